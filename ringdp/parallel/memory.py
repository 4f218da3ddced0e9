"""Bytes per rank by category: measured as buffers are taken and freed, and by formula.

    parameters     what the rank keeps of them between steps
    gathered_peak  units gathered for their forward or backward, at the worst moment (stage 3)
    gradients      what the rank keeps of them for the optimizer
    buckets        gradients on their way to other ranks, at the worst moment (stages 2, 3)
    optimizer      the optimizer's state

It leaves out activations, and the gradients that autograd has made and the engine has not yet
flattened: those of the unit whose backward runs, and of the root. The formulas are those of a step
with one forward and one backward, in which every unit is called once and none lies inside another;
gradients that accumulate over several backwards take one bucket in stages 0 and 1, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.comm import Communicator
from ringdp.parallel.layout import Unit
from ringdp.parallel.prefetch import gathered_peak
from ringdp.parallel.stages import Keep, Stage


class Memory(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    gathered_peak: int
    gradients: int
    buckets: int
    optimizer: int


class Ledger:
    """Makes and counts the engine's buffers: `now` and `peak` bytes of each category.

    The communicator makes them in memory that collectives read and write in place.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def take(self, category: str, size: int) -> None:
        self.now[category] += size
        self.peak[category] = max(self.peak[category], self.now[category])

    def give(self, category: str, size: int) -> None:
        self.now[category] -= size

    def empty(self, category: str, elements: int, like: Tensor) -> Tensor:
        """A new flat buffer, counted."""
        self.take(category, elements * like.element_size())
        return self.make(elements, like)

    def make(self, elements: int, like: Tensor) -> Tensor:
        """A new flat buffer, not counted."""
        if like.is_cpu:
            return self.comm.empty(elements, dtype=like.dtype)
        return torch.empty(elements, dtype=like.dtype, device=like.device)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state."""
    return sum(
        value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def formula(
    units: Sequence[Unit],
    stage: Stage,
    rank: int,
    *,
    itemsize: int,
    limit: int,
    per_element: int,
    per_parameter: int,
) -> Memory:
    """Exact bytes per rank. For Adam in float32: 8 bytes per element, 4 per parameter (`step`).

    In elements, with Ψ the sum of the units' padded sizes: parameters Ψ or Ψ/n, gradients Ψ or Ψ/n,
    the optimizer its elements of Ψ or Ψ/n without padding (Rajbhandari et al. 2020, figure 1);
    gathered units by replaying an iteration (see `gathered_peak`); one bucket, as large as the
    largest unit.
    """
    full = itemsize * sum(u.padded for u in units)
    shard = itemsize * sum(u.shard for u in units)
    if stage.optimizer is Keep.FULL:
        owned = [e.elements for u in units for e in u.entries if e.elements]
    else:
        owned = [elements for u in units for elements in u.owned(rank)]
    gathers = stage.parameters is Keep.SHARD
    sizes = [itemsize * u.padded for u in units]
    return Memory(
        parameters=full if stage.parameters is Keep.FULL else shard,
        gathered_peak=gathered_peak(sizes, limit) if gathers else 0,
        gradients=full if stage.gradients is Keep.FULL else shard,
        buckets=max(sizes) if stage.gradients is Keep.SHARD else 0,
        optimizer=per_element * sum(owned) + per_parameter * len(owned),
    )


def traffic(units: Sequence[Unit], stage: Stage, *, itemsize: int) -> int:
    """Exact bytes that one rank sends in a step.

    A reduce_scatter or an all_gather sends n - 1 shards, an all_reduce twice that. The root stays
    gathered from its forward to its backward, so stage 3 gathers it once.
    """
    reductions = 2 if stage.reduction == "all_reduce" else 1
    return sum(
        (u.ranks - 1) * u.shard * itemsize * (reductions + min(stage.gathers, 1 if root else 2))
        for root, u in zip([True, *[False] * len(units)], units, strict=False)
    )
