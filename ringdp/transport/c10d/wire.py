"""Messages over gloo: a stamp, with a payload of up to INLINE bytes; a longer one comes after it.

    stamp   number, kind or digest, length of the payload (int64 each)

If a message is longer than the buffer posted for it, gloo aborts the process. So a receiver posts
one for a stamp with INLINE bytes, and for a longer payload only when it has checked the length.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from ctypes import memmove, py_object, pythonapi, string_at
from datetime import timedelta
from functools import partial
from struct import Struct
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from ringdp.errors import CommunicationError, UsageError
from ringdp.transport.base import STAMP_BYTES, Stamp
from ringdp.transport.store.client import PATIENCE, StoreSilent
from ringdp.transport.store.handshake import Handshake

INLINE = 64 << 10  # bytes; up to this a send does not wait for its receiver, as in shared memory
# gloo's tags have 31 bits: one for collectives, and one for their long payloads; two without
# messages, which only notice the end of a peer, and cut connections; from USERS on for users' tags,
# and from LONGS on for their long payloads.
COLLECTIVE, PAYLOAD, ENDS, CUT, USERS, LONGS = 0, 1, 2, 3, 4, 1 << 30
TAGS = LONGS - USERS
_STAMP = Struct("3q")
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
    _groups.add(made)
    return cast(ProcessGroup, made)  # it has a group's methods


def _abandon_all() -> None:
    """In a forked child: never destroy a group, which would join threads that are not there."""
    for group in _held:
        pythonapi.Py_IncRef(py_object(group))


_groups: WeakSet[Any] = WeakSet()
_held: list[
    Any
] = []  # while a process forks: Python drops the threads' objects before handlers run
os.register_at_fork(
    before=lambda: _held.extend(_groups), after_in_parent=_held.clear, after_in_child=_abandon_all
)


def sends(
    group: ProcessGroup, payload: Tensor, to: int, tag: int, number: int, kind: int
) -> Iterator[Work]:
    """Send `payload`: each of these works starts when the iterator, which is in C, comes to it.
    Over INLINE bytes it must not change before the last has ended. `number`, `kind`: of its stamp.
    """
    size = payload.nbytes
    first = bytearray(_STAMP.pack(number, kind, size))
    if size <= INLINE:
        first += string_at(payload.data_ptr(), size)  # between ranks that wait, an op takes 5 us
        return map(group.send, [[_tensor(first)]], [to], [tag])
    tags = [tag, _payload_tag(tag, number)]
    return map(group.send, [[_tensor(first)], [as_bytes(payload)]], [to, to], tags)


class Incoming:
    """A message that is being received."""

    def __init__(self, group: ProcessGroup, sender: int, tag: int) -> None:
        """A message from `sender`, or any rank if that is -1. `post`, a C call, posts the receive
        of its first part."""
        self._group, self._tag = group, tag
        self._bytes = bytearray(STAMP_BYTES + INLINE)
        self._first = _tensor(self._bytes)
        self._works = list[Work]()
        if sender < 0:
            works = map(group.recv_anysource, [[self._first]], [tag])
        else:
            works = map(group.recv, [[self._first]], [sender], [tag])
        self.post = partial(self._works.extend, works)

    @property
    def first(self) -> Work:
        return self._works[0]

    @property
    def stamp(self) -> Stamp:
        """The message's stamp, valid once the first part has arrived."""
        number, kind, length = _STAMP.unpack_from(self._bytes)
        return number, kind, length

    def begin(self, into: Tensor, sender: int) -> Work | None:
        """Start to receive the payload into a buffer, which must be as long as the stamp says.
        Returns None if it is there already."""
        if into.nbytes > INLINE:
            number, _, _ = self.stamp
            return self._group.recv([as_bytes(into)], sender, _payload_tag(self._tag, number))
        memmove(into.data_ptr(), self._first.data_ptr() + STAMP_BYTES, into.nbytes)
        return None


def _tensor(memory: bytearray) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def as_bytes(buffer: Tensor) -> Tensor:
    dense = buffer.as_strided((buffer.numel(),), (1,))  # a single element may have another stride
    return dense.view(torch.uint8)


def tag_of(kind: int) -> int:
    """Return gloo's tag for a kind of message. Raises UsageError if its tag is too large."""
    tag = kind >> 24
    if tag >= TAGS:
        raise UsageError(f"tag is {tag}; over torch.distributed tags are 0..{TAGS - 1}")
    return USERS + tag


def _payload_tag(tag: int, number: int) -> int:
    """Return gloo's tag for the long payload of a message that has this tag and number."""
    return PAYLOAD if tag == COLLECTIVE else LONGS + number % (1 << 30)
