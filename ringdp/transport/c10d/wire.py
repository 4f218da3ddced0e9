"""Messages over a torch.distributed group, in two parts, of which the first has a fixed length:

    HEAD bytes: number, kind or digest, length (int64 each) | the payload's first INLINE bytes
    the rest of the payload, if there is any

A backend may abort the process where a message is longer than the buffer that waits for it (gloo
does). So a length is checked before a buffer is given to the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

from ringdp.errors import CommunicationError, UsageError
from ringdp.transport.base import Stamp
from ringdp.transport.store.client import StoreSilent
from ringdp.transport.store.handshake import Handshake

HEAD, INLINE = 24, 1000  # bytes
# A backend's tags have 31 bits: collectives', two without messages, users', long rests'.
COLLECTIVE, ENDS, CUT, USERS, RESTS = 0, 1, 2, 3, 1 << 30
TAGS = RESTS - USERS
LONG = timedelta(days=365)  # who waits here has a timeout of its own


class Pending(Protocol):
    """torch's Work."""

    def wait(self, timeout: timedelta, /) -> object: ...
    def _source_rank(self) -> int: ...


class Group(Protocol):
    """What it takes of a torch.distributed group, or of a backend."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Pending: ...
    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Pending: ...
    def recv_anysource(self, tensors: list[Tensor], tag: int, /) -> Pending: ...


def gloo(handshake: Handshake, store: Store, timeout: timedelta) -> Group:
    """A group, which uses the store while it is made. Collective.

    Raises CommunicationError where the ranks do not meet.
    """
    handshake.together("here")
    try:
        made = handshake.called(
            lambda: ProcessGroupGloo(store, handshake.rank, handshake.ranks, timeout)
        )
    except (CommunicationError, StoreSilent):
        raise
    except RuntimeError as e:
        raise CommunicationError(
            f"rank {handshake.rank} cannot reach the others by gloo: {e}"
        ) from e
    return cast(Group, made)


def send(
    group: Group, payload: Tensor, to: int, stamp: Stamp, tag: int, rest_tag: int
) -> list[Pending]:
    """Begin to send a buffer, which may be changed at once."""
    number, kind, _ = stamp
    data = as_bytes(payload)
    first = torch.zeros(HEAD + INLINE, dtype=torch.uint8)
    first[:HEAD] = torch.tensor([number, kind, len(data)]).view(torch.uint8)
    first[HEAD : HEAD + len(data)] = data[:INLINE]
    parts = [group.send([first], to, tag)]
    if len(data) > INLINE:
        parts.append(group.send([data[INLINE:].clone()], to, rest_tag))
    return parts


class Incoming:
    """A message that is waited for."""

    def __init__(self, group: Group, sender: int, tag: int) -> None:
        """`sender` -1: anybody."""
        self._group, self._first = group, torch.empty(HEAD + INLINE, dtype=torch.uint8)
        if sender < 0:
            self.first = group.recv_anysource([self._first], tag)
        else:
            self.first = group.recv([self._first], sender, tag)

    @property
    def stamp(self) -> Stamp:
        """Once the first part is here."""
        number, kind, length = self._first[:HEAD].clone().view(torch.int64).tolist()
        return number, kind, length

    def take(
        self, into: Tensor, sender: int, rest_tag: int, wait: Callable[[Pending], None]
    ) -> None:
        """Fill a buffer, which must be as long as the stamp says."""
        data = as_bytes(into)
        data[:INLINE] = self._first[HEAD : HEAD + len(data)]
        if len(data) > INLINE:
            wait(self._group.recv([data[INLINE:]], sender, rest_tag))


def as_bytes(buffer: Tensor) -> Tensor:
    dense = buffer.as_strided((buffer.numel(),), (1,))  # which a single element need not be
    return dense.view(torch.uint8)


def tag_of(kind: int) -> int:
    """A user's, from a message's kind. Raises UsageError for one that has no room."""
    tag = kind >> 24
    if tag >= TAGS:
        raise UsageError(f"tag is {tag}; over torch.distributed tags are 0..{TAGS - 1}")
    return USERS + tag


def rest_tag(number: int) -> int:
    """Of the second part of that message."""
    return RESTS + number % (1 << 30)
