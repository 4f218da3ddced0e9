"""Tensors of any shapes and dtypes that ranks send one another, as bytes, in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ringdp.comm import Communicator


class Exchange:
    """What this rank sends to each other one, and receives, once it is `run`."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self._begin()

    def _begin(self) -> None:
        self.sent: list[list[Tensor]] = [[] for _ in range(self.comm.size)]
        self.received: list[list[Tensor]] = [[] for _ in range(self.comm.size)]

    def send(self, rank: int, tensor: Tensor) -> None:
        """`run` reads it."""
        self.sent[rank].append(tensor)

    def receive(self, rank: int, tensor: Tensor) -> None:
        """`run` fills it with what that rank sends in this place."""
        self.received[rank].append(tensor)

    def run(self) -> None:
        """Collective."""
        sent, received = ([*chain.from_iterable(each)] for each in (self.sent, self.received))
        given = torch.cat(
            [_bytes(t.contiguous()).to(self.device) for t in sent] or [self._empty(0)]
        )
        into = self._empty(sum(t.nbytes for t in received))
        self.comm.all_to_all_v(into, given, _sizes(self.received), _sizes(self.sent))
        for t, part in zip(received, torch.split(into, [t.nbytes for t in received]), strict=True):
            _bytes(t).copy_(part)
        self._begin()

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def _sizes(each: Sequence[Sequence[Tensor]]) -> list[int]:
    return [sum(t.nbytes for t in tensors) for tensors in each]


def share(comm: Communicator, tensors: Sequence[Sequence[Tensor]]) -> None:
    """Each rank has its own, tensors[rank], and gets the others. Collective."""
    parts = [[_bytes(t) for t in of_rank] for of_rank in tensors]
    sizes = [sum(map(len, of_rank)) for of_rank in parts]
    own = torch.cat(parts[comm.rank] or [torch.empty(0, dtype=torch.uint8, device="cpu")])
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    comm.all_gather_v(flat, own, sizes)
    every = [part for of_rank in parts for part in of_rank]
    for part, found in zip(every, torch.split(flat, [*map(len, every)]), strict=True):
        part.copy_(found)


def _bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
