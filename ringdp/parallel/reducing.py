"""Gradient reduction: gradients fill their unit's bucket, which is reduced while backward goes on.

    open      a unit's backward starts: it gets a bucket, or its sums in no_sync
    take      a gradient is scaled, cast and moved in
    close     all have come: the all_reduce or reduce_scatter starts (with replicas, after that an
              all_reduce of the rank's shard over these)
    hand_out  backward and all reductions are over: p.grad is set

If a unit has no bucket of its own, one is allocated, and one such bucket is reduced at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.comm import Communicator, Work
from ringdp.errors import UsageError
from ringdp.kernels.precision import scaled_copy
from ringdp.parallel.accounting.memory import Ledger
from ringdp.parallel.gradients import GradBuffer
from ringdp.parallel.guards import sliced
from ringdp.parallel.guards.resting import unguarded
from ringdp.parallel.no_sync import UnreducedGrads
from ringdp.parallel.unit import FlatUnit


class _Turn(NamedTuple):
    """One unit in one backward, from `open` to `hand_out`."""

    unit: FlatUnit
    keep: bool  # not to be reduced
    accumulate: bool  # p.grad held something before
    shows: list[bool]  # which parameters have a .grad afterwards


@dataclass
class _Reduction:
    """A unit's reduction on its way: by `work`, which reads the bucket, and with replicas by
    `then`, an all_reduce of `result`, which whoever asks or waits begins once `work` is over."""

    turn: _Turn
    bucket: Tensor
    result: Tensor
    work: Work
    then: Callable[[], Work] | None = None
    last: Work | None = None  # once `work` is over

    @property
    def in_place(self) -> bool:
        """Whether the result lies where the optimizer reads it."""
        return self.result is self.turn.unit.gradients.reduced

    def go_on(self) -> Work:
        """Wait for `work`, and begin what is left to do. On a GPU the current stream waits."""
        self.work.wait()
        if self.last is None:
            self.last = self.then() if self.then else self.work
        return self.last

    def is_completed(self) -> bool:
        return self.work.is_completed() and self.go_on().is_completed()


class Reducing:
    """Reduces over communicators of its own: `comm`, and then `replicas` if there are several (see
    `ranks`). Without `overlap`, waits for each at once."""

    def __init__(
        self,
        comm: Communicator,
        ledger: Ledger,
        replicas: Communicator | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        self.comm, self.replicas, self.ledger, self.overlap = comm, replicas, ledger, overlap
        self._turns: dict[int, _Turn] = {}
        self._open: dict[int, GradBuffer] = {}  # units that still take gradients
        self._pending: list[_Reduction] = []
        self._landed: list[Work] = []  # what goes on of those whose buckets are free
        self._copying: set[torch.cuda.Stream] = set()  # that copy results to the host
        self._between: torch.cuda.Stream | None = None  # waits for reduce_scatters
        self.unreduced = UnreducedGrads(ledger)
        self.handed_out = 0  # increases with every backward

    @unguarded
    def open(self, unit: FlatUnit, *, keep: bool) -> None:
        """Start to take the unit's gradients, to average them or, with `keep`, to add them up
        unreduced. What p.grad holds moves to the unit's gradient memory first.
        """
        # A parameter frozen since its last gradient keeps that, as in torch.
        shows = [p.requires_grad or p.grad is not None for p in unit.parameters]
        self.unreduced.settle(unit)
        accumulate = _set_aside(unit)
        if keep or unit in self.unreduced:
            buffer = self.unreduced.open(unit)
        else:
            buffer = GradBuffer(unit.plan, self._bucket(unit, accumulate), 1 / unit.divisor)
        self._turns[unit.index] = _Turn(unit, keep, accumulate, shows)
        self._open[unit.index] = buffer

    def take(self, unit: FlatUnit, at: int) -> None:
        """Move the .grad of the unit's parameter `at` into the bucket. Raises UsageError if the
        unit is closed, so that this is a second gradient."""
        if not self.is_open(unit):
            raise UsageError(
                f"parameter {unit.plan.entries[at].name} of unit {unit.plan.name!r} got a second "
                "gradient in one backward, as a module does that is used twice under reentrant "
                "checkpointing. Pass use_reentrant=False to torch.utils.checkpoint."
            )
        parameter = unit.computed[at]
        if parameter.grad is not None:  # a hook of the user's may have taken it away
            gradient, parameter.grad = parameter.grad, None
            self._open[unit.index].take(at, gradient)
        if self.replicas:
            self.through()  # their all_reduces begin

    def is_open(self, unit: FlatUnit) -> bool:
        return unit.index in self._open

    def opened(self) -> list[int]:
        """The units that are open, the last one first."""
        return sorted(self._open, reverse=True)

    def close(self, unit: FlatUnit) -> None:
        """All gradients of the unit have come: reduce them, unless they are kept."""
        if self._turns[unit.index].keep:
            del self._open[unit.index]
        else:
            self.start(unit)

    @unguarded
    def hand_out(self, unit: FlatUnit) -> None:
        """Set every p.grad, after backward and all reductions."""
        self.handed_out += 1
        turn = self._turns.pop(unit.index)
        if unit in self.unreduced:
            self.unreduced.show(unit, turn.shows, reduced=turn.accumulate)
            return
        views = unit.gradients.views()
        for p, gradient, show in zip(unit.parameters, views, turn.shows, strict=True):
            if show:
                p.grad = gradient
                sliced.mark_grad(gradient, p)

    def start(self, unit: FlatUnit) -> None:
        """Average the unit's gradients over the ranks."""
        turn, bucket = self._turns[unit.index], self._open[unit.index].whole()
        if bucket is not unit.gradients.bucket:
            self._land()
        del self._open[unit.index]
        sums = self.unreduced.pop(unit)
        if sums is not None:
            bucket = self._bucket(unit, turn.accumulate)
            scaled_copy(sums, bucket, 1 / unit.divisor)
            del sums
        directly = unit.widths.own and not turn.accumulate
        result = unit.gradients.reduced if directly else bucket[unit.cut.keeps]
        tag = unit.index
        if unit.stage.reduction == "all_reduce":
            work = self.comm.all_reduce(bucket, async_op=True, tag=tag)
        else:
            work = self.comm.reduce_scatter(result, bucket, async_op=True, tag=tag)
        then = None
        if self.replicas:
            then = partial(self.replicas.all_reduce, result, async_op=True, tag=tag)
        self._pending.append(_Reduction(turn, bucket, result, work, then))
        if then and bucket.is_cuda:
            if self._between is None:
                self._between = torch.cuda.Stream(bucket.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._between):
                self._pending[-1].go_on()
        if not self.overlap:
            self.finish()

    @property
    def ended(self) -> bool:
        """Whether no further reduction can succeed."""
        return self.comm.ended or bool(self.replicas and self.replicas.ended)

    def sent_bytes(self) -> int:
        """Bytes that this rank has sent."""
        return self.comm.sent_bytes() + (self.replicas.sent_bytes() if self.replicas else 0)

    def under_way(self) -> int:
        """Bytes of the buckets being reduced."""
        return sum(reduction.bucket.nbytes for reduction in self._pending)

    def through(self) -> bool:
        """Whether `finish` would not have to wait. Asks in order, so that all ranks begin the
        replicas' all_reduces in one."""
        under_way: list[Work | _Reduction] = [*self._landed, *self._pending]
        return all(each.is_completed() for each in under_way)

    def finish(self) -> None:
        """Wait for all reductions, and for copies of their results to the host."""
        self._land()
        while self._landed:
            self._landed[0].wait()
            self._landed.pop(0)
        while self._copying:
            self._copying.pop().synchronize()

    def drop(self) -> None:
        """Drop all gradients that are not reduced yet."""
        for index, buffer in self._open.items():
            if (unit := self._turns[index].unit) not in self.unreduced:
                self._give(unit, buffer.flat)
        self._open.clear()
        self._turns.clear()
        self.unreduced.drop()

    def _bucket(self, unit: FlatUnit, accumulate: bool) -> Tensor:
        if unit.gradients.bucket is not None and not (accumulate and unit.widths.own):
            return unit.gradients.bucket
        return self.ledger.empty("buckets", unit.plan.padded, unit.dtypes.reduce)

    def _give(self, unit: FlatUnit, bucket: Tensor) -> None:
        if bucket is not unit.gradients.bucket:
            self.ledger.give("buckets", bucket.nbytes)

    def _land(self) -> None:
        """Wait until no reduction reads a bucket, so that the next one can take their memory, but
        not for replicas, nor for copies to the host."""
        while self._pending:
            reduction = self._pending[0]
            goes_on = reduction.go_on()  # KeyboardInterrupt may end a wait, and the next call waits
            if not reduction.in_place:
                goes_on.wait()
                self._copy(reduction)
            elif self.replicas:
                self._landed.append(goes_on)
            self._pending.pop(0)
            self._give(reduction.turn.unit, reduction.bucket)

    def _copy(self, reduction: _Reduction) -> None:
        """Copy or add the result to what the optimizer reads."""
        result, reduced = reduction.result, reduction.turn.unit.gradients.reduced
        if reduction.turn.accumulate:
            reduced.add_(result.to(reduced.device))
            return
        reduced.copy_(result, non_blocking=True)
        if result.is_cuda and not reduced.is_cuda:
            self._copying.add(torch.cuda.current_stream(result.device))


def _set_aside(unit: FlatUnit) -> bool:
    """Move every p.grad to the unit's gradient memory. Returns whether there was any."""
    before = [p.grad for p in unit.parameters]
    there = [gradient for gradient in before if gradient is not None]
    if unit.gradients.are_held(there):
        unit.renew_gradients()
    if not there:
        return False
    unit.gradients.store(before)
    for p in unit.parameters:
        p.grad = None
    return True
