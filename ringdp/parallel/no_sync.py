"""Gradients of no_sync: accumulated unreduced, unit by unit, until a backward reduces them.

Until then a parameter's .grad shows what was reduced before, or else this rank's slice of its own
sums, so that zero_grad() finds something to clear. If .grad is None or zero at the next backward or
step, the sums are dropped too, as in torch's DDP. Any other change to .grad is an error, because
the user cannot reach the rest of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.parallel.accounting.memory import Ledger
from ringdp.parallel.gradients import GradBuffer
from ringdp.parallel.guards import sliced
from ringdp.parallel.unit import FlatUnit


class _Shown(NamedTuple):
    """What a parameter's .grad was set to; None if it is frozen and had none."""

    gradient: Tensor | None
    version: int  # torch's, which in-place writes increase
    reduced: bool


class UnreducedGrads:
    """The unreduced sums of all units, whole on each rank, in the masters' dtype."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._sums: dict[int, GradBuffer] = {}
        self._shown: dict[int, list[_Shown]] = {}

    def __contains__(self, unit: FlatUnit) -> bool:
        return unit.index in self._sums

    def open(self, unit: FlatUnit) -> GradBuffer:
        """The unit's sums, made on first use, to add gradients to."""
        if unit not in self:
            sums = torch.empty(
                unit.plan.padded, dtype=unit.dtypes.master, device=self.ledger.device
            )
            self.ledger.take("gradients", sums.nbytes)
            self._sums[unit.index] = GradBuffer(unit.plan, sums)
        return self._sums[unit.index]

    def show(self, unit: FlatUnit, shows: Sequence[bool], *, reduced: bool) -> None:
        """Set each .grad in `shows`: to the reduced gradient if there is one (`reduced`), else to
        this rank's slice of the sums."""
        if reduced:
            views = unit.gradients.views()
        else:
            views = unit.cut.kept(self._sums[unit.index].whole()[unit.cut.keeps])
        shown = []
        for p, view, show in zip(unit.parameters, views, shows, strict=True):
            gradient = view.data.to(p.device) if show else None  # a version of its own
            p.grad = gradient
            if gradient is not None:
                sliced.mark_grad(gradient, p)
            shown.append(
                _Shown(gradient, gradient._version if gradient is not None else 0, reduced)
            )
        self._shown[unit.index] = shown

    def settle(self, unit: FlatUnit) -> None:
        """Take shown sums out of .grad again, and drop the sums that the user has cleared."""
        self._forget_cleared(unit)
        for at, was in enumerate(self._shown.pop(unit.index, ())):
            if not was.reduced:
                unit.parameters[at].grad = None

    def _forget_cleared(self, unit: FlatUnit) -> None:
        if (shown := self._shown.get(unit.index)) is None:
            return
        cleared = [
            _is_cleared(p.grad, was, entry.name)
            for p, was, entry in zip(unit.parameters, shown, unit.plan.entries, strict=True)
        ]
        if all(cleared):
            self.pop(unit)
            return
        for at, clear in enumerate(cleared):
            if clear:
                self._sums[unit.index].part(at).zero_()

    def check_none_waits(self, units: Sequence[FlatUnit], what: str) -> None:
        """Raise UsageError, which begins with `what`, if any sums are not reduced yet."""
        for unit in units if self._shown else ():  # most often none: norms check before each
            self._forget_cleared(unit)
            if unit not in self:
                self._keep_zeros(unit)
        if self._sums:
            raise UsageError(
                f"{what}, but gradients made within no_sync(), or after "
                "set_requires_gradient_sync(False), have not been reduced; the last backward "
                "before must be outside of it, or after set_requires_gradient_sync(True)"
            )

    def _keep_zeros(self, unit: FlatUnit) -> None:
        """Move the zeros that the user has written over shown sums to the unit's gradient memory:
        an optimizer steps with them, and not without a gradient."""
        if self._shown.pop(unit.index, None) is None:
            return
        for p, view in zip(unit.parameters, unit.gradients.views(), strict=True):
            if p.grad is not None:
                p.grad = view.zero_()

    def pop(self, unit: FlatUnit) -> Tensor | None:
        """Remove and return the unit's sums, [padded]."""
        buffer = self._sums.pop(unit.index, None)
        if buffer is None:
            return None
        self.ledger.give("gradients", buffer.flat.nbytes)
        return buffer.whole()

    def drop(self) -> None:
        self.ledger.give("gradients", sum(f.flat.nbytes for f in self._sums.values()))
        self._sums.clear()
        self._shown.clear()


def _is_cleared(gradient: Tensor | None, was: _Shown, name: str) -> bool:
    """Whether the user has cleared it. Raises UsageError if it was changed otherwise."""
    if gradient is None:
        return True
    if gradient is was.gradient and gradient._version == was.version:
        return False
    if not gradient.any():
        return True
    raise UsageError(
        f"the .grad of parameter {name} was changed while gradients of no_sync wait for their "
        "reduction. Clear it, by zero_grad(), or leave it until a backward outside of no_sync; to "
        "weigh micro-batches scale their losses."
    )
