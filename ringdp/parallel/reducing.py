"""Gradients on their way: flattened, scaled and reduced unit by unit, while backward goes on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.comm import Communicator, Work
from ringdp.kernels import flatten
from ringdp.parallel.kept import Kept
from ringdp.parallel.memory import Ledger
from ringdp.parallel.stages import Stage
from ringdp.parallel.unit import FlatUnit


class _Reduction(NamedTuple):
    unit: FlatUnit
    bucket: Tensor
    work: Work
    accumulate: bool


class Reducing:
    """Over a communicator of its own. Without `overlap` every reduction is waited for at once."""

    def __init__(
        self, comm: Communicator, stage: Stage, ledger: Ledger, *, overlap: bool = True
    ) -> None:
        self.comm, self.stage, self.ledger, self.overlap = comm, stage, ledger, overlap
        self._pending: list[_Reduction] = []
        self.kept = Kept(ledger)

    def start(self, unit: FlatUnit, *, accumulate: bool) -> None:
        """Average the unit's new gradients over the ranks, and take them off the parameters.

        The result goes to, or with `accumulate` on top of, the unit's own gradient. Where that
        cannot serve as the bucket, one other bucket exists at a time.
        """
        if unit in self.kept:
            self.keep(unit)
        if unit.bucket is not None and not (accumulate and unit.widths.own):
            bucket = unit.bucket
        else:
            self.finish()
            bucket = self.ledger.empty(
                "buckets", unit.plan.padded, unit.dtypes.reduce, unit.full.device
            )
        if (kept := self.kept.pop(unit)) is not None:
            flatten([kept], bucket, scale=1 / self.comm.size, offsets=[0])
        else:
            made = _made(unit)
            flatten(
                [g for g, _ in made],
                bucket,
                scale=1 / self.comm.size,
                offsets=[offset for _, offset in made],
            )
        for p in unit.computed:
            p.grad = None
        if self.stage.reduction == "all_reduce":
            work = self.comm.all_reduce(bucket, async_op=True, tag=unit.index)
        else:
            own = bucket[unit.part]
            work = self.comm.reduce_scatter(own, bucket, async_op=True, tag=unit.index)
        self._pending.append(_Reduction(unit, bucket, work, accumulate))
        if not self.overlap:
            self.finish()

    def keep(self, unit: FlatUnit) -> None:
        """Add the unit's new gradients to those that wait for a reduction."""
        self.kept.add(unit, _made(unit))
        for p in unit.computed:
            p.grad = None

    def finish(self) -> None:
        """Wait for all that has been started."""
        to_host = False
        while self._pending:
            to_host |= self._finish(self._pending.pop(0))
        if to_host:
            torch.cuda.current_stream().synchronize()

    def _finish(self, reduction: _Reduction) -> bool:
        """True if a copy to the host is under way."""
        unit, bucket, work, accumulate = reduction
        work.wait()
        if bucket is unit.bucket and unit.widths.own:
            return False
        result = bucket if self.stage.reduction == "all_reduce" else bucket[unit.part]
        if accumulate:
            unit.gradient.add_(result.to(unit.gradient.device))
        else:
            unit.gradient.copy_(result, non_blocking=True)
        if bucket is not unit.bucket:
            self.ledger.give("buckets", bucket.nbytes)
        return result.is_cuda and not unit.gradient.is_cuda


def _made(unit: FlatUnit) -> list[tuple[Tensor, int]]:
    """The gradients that autograd has made, and where they lie in the unit."""
    return [
        (p.grad, e.offset)
        for p, e in zip(unit.computed, unit.plan.entries, strict=True)
        if p.grad is not None
    ]
