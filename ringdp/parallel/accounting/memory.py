"""Memory accounting: an engine's buffers by category, counted as they are allocated and freed.

    parameters     kept between steps, masters included
    gathered_peak  units gathered for forward or backward, at the peak (stage 3)
    gradients      kept for the optimizer
    buckets        gradients being reduced: what they add to that peak (stages 2, 3)
    optimizer      the optimizer's state

Offloaded bytes on the host count too. Activations are left out, and so is the single gradient that
autograd hands over. `formula` predicts these numbers exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ringdp.comm import Communicator
from ringdp.parallel.layout import Unit
from ringdp.parallel.offload import Offload
from ringdp.parallel.pool import Pool
from ringdp.parallel.precision import Dtypes
from ringdp.parallel.ranks import Ranks
from ringdp.parallel.stages import Keep, Stage


class Memory(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    gathered_peak: int
    gradients: int
    buckets: int
    optimizer: int


class Widths(NamedTuple):
    """Bytes per element of one unit's buffers (see `precision`), and which of them exist."""

    master: int
    compute: int
    reduce: int
    apart: bool = False  # see Note [masters apart]
    own: bool = True  # the optimizer may read the bucket's memory
    on_device: bool = True  # the device keeps a shard to gather from
    trainable: bool = True

    def parameters(self, unit: Unit, stage: Stage) -> int:
        held = self.compute * _kept(unit, stage.parameters) if self.on_device else 0
        return held + self.master * _kept(unit, stage.optimizer) if self.apart else held

    def keeps_bucket(self, stage: Stage) -> bool:
        return stage.gradients is Keep.FULL and (stage.slices or self.own)

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
    """The widths of a unit whose parameters have these dtypes."""
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
    """Allocates and counts the engine's buffers: bytes of each category `now` and at its `peak`,
    and at the peak of "passing": gathered units and buckets together.

    `device`: where the model computes. On the CPU the buffers are the memory of a communicator,
    whose collectives read and write it in place. `offload`: which are on the host instead.
    """

    def __init__(self, ranks: Ranks, device: torch.device, offload: Offload) -> None:
        self.ranks, self.device, self.offload, self.pool = ranks, device, offload, Pool()
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
        self,
        category: str,
        elements: int,
        dtype: torch.dtype,
        comm: Communicator | None = None,
    ) -> Tensor:
        """Allocate a flat buffer, and count it."""
        made = self.make(elements, dtype, comm)
        self.take(category, made.nbytes)
        return made

    def make(self, elements: int, dtype: torch.dtype, comm: Communicator | None = None) -> Tensor:
        """Allocate a flat buffer for `comm`, by default `ranks.shards`, not counted."""
        if self.device.type == "cpu":
            return (comm or self.ranks.shards).empty(elements, dtype=dtype)
        return torch.empty(elements, dtype=dtype, device=self.device)


def state_bytes(states: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the tensors in an optimizer's state; memory that several share counts once."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in tree_leaves([*states])
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


def holders(tensor: Tensor) -> int:
    """The number of tensors that share its memory, plus a constant."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
