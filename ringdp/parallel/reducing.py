"""Gradients on their way: flattened, scaled and reduced unit by unit, while backward goes on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ringdp.comm import Communicator, Work
from ringdp.kernels import flatten
from ringdp.parallel.memory import Ledger
from ringdp.parallel.stages import Keep, Stage
from ringdp.parallel.unit import FlatUnit


class _Reduction(NamedTuple):
    unit: FlatUnit
    bucket: Tensor
    work: Work
    accumulate: bool


class Reducing:
    """Over a communicator of its own."""

    def __init__(self, comm: Communicator, stage: Stage, ledger: Ledger) -> None:
        self.comm, self.stage, self.ledger = comm, stage, ledger
        self._pending: list[_Reduction] = []

    def start(self, unit: FlatUnit, *, accumulate: bool) -> None:
        """Average the unit's `p.grad` over the ranks, and take them off the parameters.

        The result goes to, or with `accumulate` on top of, the unit's own gradient. Where that
        cannot serve as the bucket, one other bucket exists at a time.
        """
        bucket = unit.gradient
        if accumulate or self.stage.gradients is Keep.SHARD:
            self.finish()
            bucket = self.ledger.empty("buckets", unit.plan.padded, unit.gradient)
        made = [
            (p.grad, e.offset)
            for p, e in zip(unit.parameters, unit.plan.entries, strict=True)
            if p.grad is not None
        ]
        scale = 1 / self.comm.size
        flatten([g for g, _ in made], bucket, scale=scale, offsets=[o for _, o in made])
        for p in unit.parameters:
            p.grad = None
        if self.stage.reduction == "all_reduce":
            work = self.comm.all_reduce(bucket, async_op=True, tag=unit.index)
        else:
            own = bucket[unit.part]
            work = self.comm.reduce_scatter(own, bucket, async_op=True, tag=unit.index)
        self._pending.append(_Reduction(unit, bucket, work, accumulate))

    def finish(self) -> None:
        """Wait for all that has been started."""
        while self._pending:
            self._finish(self._pending.pop(0))

    def _finish(self, reduction: _Reduction) -> None:
        unit, bucket, work, accumulate = reduction
        work.wait()
        if bucket is unit.gradient:
            return
        result = bucket if self.stage.reduction == "all_reduce" else bucket[unit.part]
        if accumulate:
            unit.own_gradient.add_(result)
        else:
            unit.own_gradient.copy_(result)
        self.ledger.give("buckets", unit.bytes)
