"""Gradients of no_sync: added up unreduced, unit by unit, until a backward that reduces them.

Meanwhile a parameter's .grad is what was reduced before, else this rank's part of what it keeps: so
that zero_grad finds something to clear. Where .grad is None or zero by the next backward, the
parameter's sums are forgotten with it, as torch's DDP does. Anything else that was done to .grad
meanwhile is an error, since the rest of the sums lies where the user cannot reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.parallel.filling import Filling
from ringdp.parallel.guards import sliced
from ringdp.parallel.memory import Ledger
from ringdp.parallel.unit import FlatUnit


class _Shown(NamedTuple):
    """What a parameter's .grad was set to, None if it is frozen and had none."""

    gradient: Tensor | None
    version: int  # that torch counts up when it is written in place
    reduced: bool


class Kept:
    """The sums of all units, in the masters' dtype."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._sums: dict[int, Filling] = {}
        self._shown: dict[int, list[_Shown]] = {}

    def __contains__(self, unit: FlatUnit) -> bool:
        return unit.index in self._sums

    def open(self, unit: FlatUnit) -> Filling:
        """The unit's sums, to add gradients to."""
        if unit not in self:
            sums = torch.empty(unit.plan.padded, dtype=unit.dtypes.master, device=unit.full.device)
            self.ledger.take("gradients", sums.nbytes)
            self._sums[unit.index] = Filling(unit.plan, sums)
        return self._sums[unit.index]

    def show(self, unit: FlatUnit, shows: Sequence[bool], *, reduced: bool) -> None:
        """Set the .grad of those; `reduced`: to what backwards outside of no_sync came to."""
        views = (
            unit.gradients.views() if reduced else unit.cut.at_rest(self._sums[unit.index].whole())
        )
        shown = []
        for p, view, show in zip(unit.parameters, views, shows, strict=True):
            gradient = view.data.to(p.device) if show else None  # a version of its own
            p.grad = gradient
            if gradient is not None:
                sliced.read(gradient, p)
            shown.append(
                _Shown(gradient, gradient._version if gradient is not None else 0, reduced)
            )
        self._shown[unit.index] = shown

    def settle(self, unit: FlatUnit) -> None:
        """Leave in .grad what was reduced, and forget the sums of what the user has cleared."""
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
        """Raises UsageError, which begins with `what`, if some wait for a backward that reduces
        them."""
        for unit in units:
            self._forget_cleared(unit)
            if unit not in self:
                self.settle(unit)
        if self._sums:
            raise UsageError(
                f"{what}, but gradients made within no_sync() have not been reduced; the last "
                "backward before must be outside of it"
            )

    def pop(self, unit: FlatUnit) -> Tensor | None:
        """The unit's sums, which are no longer kept."""
        filling = self._sums.pop(unit.index, None)
        if filling is None:
            return None
        self.ledger.give("gradients", filling.flat.nbytes)
        return filling.whole()

    def drop(self) -> None:
        """Forget all."""
        self.ledger.give("gradients", sum(f.flat.nbytes for f in self._sums.values()))
        self._sums.clear()
        self._shown.clear()


def _is_cleared(gradient: Tensor | None, was: _Shown, name: str) -> bool:
    """Raises UsageError for what is neither as it was nor cleared."""
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
