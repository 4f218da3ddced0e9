"""Messages over a torch.distributed group: a first part of fixed length, then the rest.

    first   its stamp: number, kind or digest, length (int64 each) | first INLINE payload bytes
    rest    the rest of the payload, if there is any

If a message is longer than the buffer posted for it, a backend may abort the process, as gloo does.
So the receiver checks the length in the first part before it posts a buffer for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from ringdp.errors import CommunicationError, UsageError
from ringdp.transport.base import STAMP_BYTES, Stamp
from ringdp.transport.store.client import PATIENCE, StoreSilent
from ringdp.transport.store.handshake import Handshake

INLINE = 1000  # bytes
# A backend's tags have 31 bits: for collectives; two that carry no messages, which only notice the
# end of a peer, and cut connections; from USERS on for users' tags; from RESTS on for long rests.
COLLECTIVE, ENDS, CUT, USERS, RESTS = 0, 1, 2, 3, 1 << 30
TAGS = RESTS - USERS
LONG = timedelta(days=365)  # callers enforce timeouts of their own


def gloo(handshake: Handshake, store: Store) -> ProcessGroup:
    """Make a gloo group of all ranks, which meet through `store`. Collective.

    Raises CommunicationError if the ranks do not meet.
    """
    handshake.barrier("here")
    # gloo gives up after the handshake, whose error says why.
    timeout = timedelta(seconds=handshake.timeout + PATIENCE)
    try:
        made = handshake.run(
            lambda: ProcessGroupGloo(store, handshake.rank, handshake.ranks, timeout)
        )
    except (CommunicationError, StoreSilent):
        raise
    except RuntimeError as e:
        raise CommunicationError(
            f"rank {handshake.rank} cannot reach the others by gloo: {e}"
        ) from e
    return cast(ProcessGroup, made)  # it has a group's methods


def send(
    group: ProcessGroup, payload: Tensor, to: int, tag: int, number: int, kind: int
) -> list[Work]:
    """Start sending `payload`, which is copied and may be changed at once. `number`, `kind`: of its
    stamp."""
    data = as_bytes(payload)
    first = torch.zeros(STAMP_BYTES + INLINE, dtype=torch.uint8)
    first[:STAMP_BYTES] = torch.tensor([number, kind, len(data)]).view(torch.uint8)
    first[STAMP_BYTES : STAMP_BYTES + len(data)] = data[:INLINE]
    parts = [group.send([first], to, tag)]
    if len(data) > INLINE:
        parts.append(group.send([data[INLINE:].clone()], to, _rest_tag(tag, number)))
    return parts


class Incoming:
    """A message that is being received."""

    def __init__(self, group: ProcessGroup, sender: int, tag: int) -> None:
        """Post the receive of the first part from `sender`, or from any rank if it is -1."""
        self._group, self._tag = group, tag
        self._first = torch.empty(STAMP_BYTES + INLINE, dtype=torch.uint8)
        if sender < 0:
            self.first = group.recv_anysource([self._first], tag)
        else:
            self.first = group.recv([self._first], sender, tag)

    @property
    def stamp(self) -> Stamp:
        """The message's stamp, valid once the first part has arrived."""
        number, kind, length = self._first[:STAMP_BYTES].clone().view(torch.int64).tolist()
        return number, kind, length

    def take(self, into: Tensor, sender: int, wait: Callable[[Work], None]) -> None:
        """Receive the payload into a buffer, which must be as long as the stamp says."""
        data = as_bytes(into)
        data[:INLINE] = self._first[STAMP_BYTES : STAMP_BYTES + len(data)]
        if len(data) > INLINE:
            number, _, _ = self.stamp
            wait(self._group.recv([data[INLINE:]], sender, _rest_tag(self._tag, number)))


def as_bytes(buffer: Tensor) -> Tensor:
    dense = buffer.as_strided((buffer.numel(),), (1,))  # a single element may have another stride
    return dense.view(torch.uint8)


def tag_of(kind: int) -> int:
    """Return the backend's tag for a kind of message. Raises UsageError if its tag is too large."""
    tag = kind >> 24
    if tag >= TAGS:
        raise UsageError(f"tag is {tag}; over torch.distributed tags are 0..{TAGS - 1}")
    return USERS + tag


def _rest_tag(tag: int, number: int) -> int:
    """Return the backend's tag for the rest of a message that has this tag and number."""
    return COLLECTIVE if tag == COLLECTIVE else RESTS + number % (1 << 30)
