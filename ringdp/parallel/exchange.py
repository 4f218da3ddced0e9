"""Tensors of any sizes that ranks send one another, in one collective."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from ringdp.comm import Communicator


class Exchange:
    """What this rank sends to each one, itself included, and receives, once it is `run`. All 1-D,
    and of `like`'s dtype and device."""

    def __init__(self, comm: Communicator, like: Tensor) -> None:
        self.comm, self.like = comm, like
        self.sent: list[list[Tensor]] = [[] for _ in range(comm.size)]
        self.received: list[list[Tensor]] = [[] for _ in range(comm.size)]

    def send(self, rank: int, tensor: Tensor) -> None:
        """`run` reads it."""
        self.sent[rank].append(tensor)

    def receive(self, rank: int, tensor: Tensor) -> None:
        """`run` fills it with what that rank sends in this place."""
        self.received[rank].append(tensor)

    def run(self) -> None:
        """Collective. Once."""
        me = self.comm.rank
        _copy(self.received[me], self.sent[me])
        self.sent[me], self.received[me] = [], []
        given = torch.cat([*chain(*self.sent)] or [self.like.new_empty(0)])
        sizes = [sum(map(Tensor.numel, tensors)) for tensors in self.received]
        into = self.like.new_empty(sum(sizes))
        sent = [sum(map(Tensor.numel, tensors)) for tensors in self.sent]
        self.comm.all_to_all_v(into, given, sizes, sent)
        received = [*chain(*self.received)]
        _copy(received, [*into.split_with_sizes([*map(Tensor.numel, received)])])


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)
