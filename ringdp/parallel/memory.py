"""Bytes per rank by category: measured as buffers are taken and freed, and by formula.

    parameters     what the rank keeps of them between steps, masters included
    gathered_peak  units gathered for their forward or backward, at the worst moment (stage 3)
    gradients      what the rank keeps of them for the optimizer
    buckets        gradients on their way to other ranks: what they add to that peak (stages 2, 3)
    optimizer      the optimizer's state

A unit's bucket is there from the start of its backward to the end of its reduction, the root's for
the whole backward. With equal units, in one dtype, buckets are in stage 2 the root's and two units;
in stage 3, where gathers yield to reductions, the root's and one unit. So stage 3's peak is, beside
shards and activations: two gathered units, one bucket, and the root's weights and gradients (see
`replay.peaks`).
Bytes on the host count, too, where something is offloaded.
It leaves out activations, and the gradient that autograd hands over, of one parameter. The formulas
are those of a step with one forward and one backward, in which every unit is called once and none
lies inside another; gradients that accumulate over several backwards take buckets in stages 0 and
1, too, and those that wait in no_sync the masters' size of their unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringdp.comm import Communicator
from ringdp.parallel.layout import Unit
from ringdp.parallel.offload import Offload
from ringdp.parallel.precision import Dtypes
from ringdp.parallel.replay import gathers, iteration, peaks
from ringdp.parallel.spare import Spare
from ringdp.parallel.stages import Keep, Stage


class Memory(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    gathered_peak: int
    gradients: int
    buckets: int
    optimizer: int


class Widths(NamedTuple):
    """Bytes per element of one unit's buffers (see `precision`), and which of them there are."""

    master: int
    compute: int
    reduce: int
    apart: bool = False  # what is gathered is not what the optimizer steps
    own: bool = True  # what a reduction comes to may be what the optimizer reads
    on_device: bool = True  # a shard to gather from is kept
    trainable: bool = True

    def parameters(self, unit: Unit, stage: Stage) -> int:
        if not self.apart:
            return self.compute * _kept(unit, stage.parameters)
        held = _kept(unit, stage.parameters)
        if stage.parameters is Keep.SHARD and not self.on_device:
            held = 0
        return self.master * _kept(unit, stage.optimizer) + self.compute * held

    def keeps_bucket(self, stage: Stage) -> bool:
        return stage.gradients is Keep.FULL and (stage.optimizer is Keep.SHARD or self.own)

    def gradients(self, unit: Unit, stage: Stage) -> int:
        if not self.trainable:
            return 0
        bucket = self.reduce * unit.padded if self.keeps_bucket(stage) else 0
        if bucket and self.own:
            return bucket
        return bucket + self.master * _kept(unit, stage.optimizer)

    def bucket(self, unit: Unit, stage: Stage) -> int:
        return 0 if self.keeps_bucket(stage) or not self.trainable else self.reduce * unit.padded


def widths_of(dtypes: Dtypes, offload: Offload, *, trainable: bool) -> Widths:
    """Of a unit whose parameters have these dtypes."""
    return Widths(
        master=dtypes.master.itemsize,
        compute=dtypes.compute.itemsize,
        reduce=dtypes.reduce.itemsize,
        apart=dtypes.compute != dtypes.master or offload.any,
        own=dtypes.reduce == dtypes.master and not offload.any,
        on_device=not offload.parameters,
        trainable=trainable,
    )


def _kept(unit: Unit, keep: Keep) -> int:
    return unit.padded if keep is Keep.FULL else unit.shard


class Ledger:
    """Makes and counts the engine's buffers: `now` and `peak` bytes of each category, and `peak` of
    what is "passing": gathered units and buckets together.

    The communicator makes them in memory that collectives read and write in place.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.spare = comm, Spare()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def take(self, category: str, size: int) -> None:
        self.now[category] += size
        self.peak[category] = max(self.peak[category], self.now[category])
        passing = self.now["gathered"] + self.now["buckets"]
        self.peak["passing"] = max(self.peak["passing"], passing)

    def give(self, category: str, size: int) -> None:
        self.now[category] -= size

    def empty(
        self, category: str, elements: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A new flat buffer, counted."""
        self.take(category, elements * dtype.itemsize)
        return self.make(elements, dtype, device)

    def make(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new flat buffer, not counted."""
        if device.type == "cpu":
            return self.comm.empty(elements, dtype=dtype)
        return torch.empty(elements, dtype=dtype, device=device)


def state_bytes(states: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the tensors in what an optimizer keeps of parameters, which may be views of one."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in states
        for value in state.values()
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


def holders(tensor: Tensor) -> int:
    """How many tensors share its memory, and a constant."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def formula(
    units: Sequence[Unit],
    groups: Sequence[Sequence[int]],
    stage: Stage,
    rank: int,
    *,
    widths: Sequence[Widths],
    limit: int,
    overlap: bool = True,
    yields: bool = True,
    per_element: int,
    per_parameter: int,
) -> Memory:
    """Exact bytes per rank. For Adam in float32: 8 bytes per element, 4 per parameter (`step`).

    In elements, with Ψ the sum of the units' padded sizes: parameters Ψ or Ψ/n, gradients Ψ or Ψ/n,
    the optimizer its elements of Ψ or Ψ/n without padding (Rajbhandari et al. 2020, figure 1);
    gathered units and buckets by replaying an iteration. `groups`: units of one module, the root's
    first. `limit`, `overlap`, `yields`: see `replay.iteration`.
    """
    each = list(zip(units, widths, strict=True))
    trained = [u for u, w in each if w.trainable]
    if stage.optimizer is Keep.FULL:
        owned = [e.elements for u in trained for e in u.entries if e.elements]
    else:
        owned = [elements for u in trained for elements in u.owned(rank)]
    freed = stage.parameters is Keep.SHARD
    sizes = [w.compute * u.padded if freed else 0 for u, w in each]
    buckets = [w.bucket(u, stage) for u, w in each]
    events = iteration(
        sizes, groups, limit, freed=freed, buckets=buckets, overlap=overlap, yields=yields
    )
    gathered, passing = peaks(events, sizes, buckets)
    return Memory(
        parameters=sum(w.parameters(u, stage) for u, w in each),
        gathered_peak=gathered,
        gradients=sum(w.gradients(u, stage) for u, w in each),
        buckets=passing - gathered,
        optimizer=per_element * sum(owned) + per_parameter * len(owned),
    )


def traffic(
    units: Sequence[Unit],
    groups: Sequence[Sequence[int]],
    stage: Stage,
    *,
    widths: Sequence[Widths],
    limit: int,
) -> int:
    """Exact bytes that one rank sends in a step.

    A reduce_scatter or an all_gather sends n - 1 shards, an all_reduce twice that. Stage 3 gathers
    twice what it frees between forward and backward (see `replay.gathers`); frozen units are not
    reduced.
    """
    reductions = 2 if stage.reduction == "all_reduce" else 1
    often = dict.fromkeys(range(len(units)), stage.gathers)
    if stage.parameters is Keep.SHARD:
        sizes = [w.compute * u.padded for u, w in zip(units, widths, strict=True)]
        often |= gathers(sizes, groups, limit)
    return sum(
        (u.ranks - 1) * u.shard * (w.compute * often[i] + w.reduce * reductions * w.trainable)
        for i, (u, w) in enumerate(zip(units, widths, strict=True))
    )
