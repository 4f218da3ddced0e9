"""A backward, as it comes to an engine's units: their weights are there, their gradients go into
buckets, and all ranks reduce these in one order.

Every backward reduces, and shards add up, but within `no_sync`. A parameter that got no gradient in
a backward counts as zero there. A backward that raises loses the gradients accumulated so far; the
next forward or backward starts afresh. Stage 3 refuses `create_graph`. The hooks that tell when a
unit's backward starts hang on what it returns or leaves in attributes (see `values.made`);
without these it starts when a gradient of a parameter comes, for which stage 3 has no weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ringdp.errors import UsageError
from ringdp.parallel.autograd_state import in_backward, leaves_some_out
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.grad_hooks import Arrivals
from ringdp.parallel.guards.resting import unguarded
from ringdp.parallel.reducing import Reducing
from ringdp.parallel.unit import FlatUnit, State


class _Backward(NamedTuple):
    trained: dict[int, FlatUnit]  # those whose gradients it hands out
    reached: set[int]
    alive: Callable[[], object]  # a weak reference to what torch drops with it, raised or not


class Backwards:
    """Of one engine, one at a time. `handles`: where those of hooks on parameters go."""

    def __init__(self, gathering: Gathering, reducing: Reducing, handles: list[Any]) -> None:
        self.units, self.gathering, self.reducing = gathering.units, gathering, reducing
        self.sync = True  # whether they reduce
        self._now: _Backward | None = None  # the one under way, or that raised
        self._around = set[int]()  # units that hold others: they are reduced after these
        me = weakref.proxy(self)  # for what torch holds where no garbage collector looks
        self._arrivals = [Arrivals(unit, me, handles) for unit in self.units]

    @property
    def running(self) -> bool:
        return self._now is not None

    def hear(self, index: int) -> None:
        """Of the unit's gradients: those of what was frozen before, too."""
        self._arrivals[index].hear()

    def reach(self, indices: Sequence[int]) -> None:
        """It comes to a module, which has these units."""
        self.settle()
        for index in indices:
            self._reduce_through(index)
            self._prepare(index)

    def gradient_comes(self, index: int, at: int) -> None:
        """A parameter's, for which its unit may not be prepared: that of a penalty of gradients
        need not come by outputs, and that of a weight which autocast has cast comes late."""
        self.settle()
        if self._has_reached(index) or self._arrivals[index].will_come(at):
            self._prepare(index)

    def recompute(self, index: int) -> None:
        """The unit's forward starts again, within a backward."""
        self._reduce_through(index)
        self._now = self._now or self._begin()
        self._use(index)

    @unguarded
    def _prepare(self, index: int) -> None:
        unit = self.units[index]
        if self._has_reached(index):
            if unit.state is not State.UNSHARDED:
                self._use(index)
            return
        if unit.freed and torch.is_grad_enabled():
            raise UsageError("stage 3 frees weights that create_graph=True needs; use stage 2")
        if unit.state is State.SUMMONED:
            raise UsageError("backward within full_parameters(), which is for reading only")
        self._now = now = self._now or self._begin()
        now.reached.add(index)
        self._use(index)
        if index in now.trained:
            self._arrivals[index].expect()
            self.reducing.open(unit, keep=not self.sync)

    def _begin(self) -> _Backward:
        units = {unit.index: unit for unit in self._trained()}
        self._around = set(self.gathering.groups[0]).union(*self.gathering.callers)
        self.gathering.begin_backward(amid=not units, again=not units and torch.is_grad_enabled())
        end = partial(self.end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return _Backward(units, set(), weakref.ref(end))

    def _trained(self) -> list[FlatUnit]:
        """None if the backward was told to make other gradients. A unit that is frozen by now is
        reduced only if gradients of no_sync wait in it."""
        if not any(arrivals.any_comes() for arrivals in self._arrivals) and leaves_some_out():
            return []
        return [
            unit
            for unit in self.units
            if unit in self.reducing.kept
            or (unit.widths.trainable and any(p.requires_grad for p in unit.parameters))
        ]

    def _has_reached(self, index: int) -> bool:
        return self._now is not None and index in self._now.reached

    def _use(self, index: int) -> None:
        self.gathering.prefetch_deferred(wait=True)
        if self._now:
            self.gathering.free_before(index)
        self.gathering.use(index)
        self.hear(index)

    def gradient_made(self, index: int, at: int) -> None:
        """It is in the .grad of the unit's parameter `at`."""
        unit, arrivals = self.units[index], self._arrivals[index]
        if unit.computed[at].requires_grad:
            self.reducing.check_open(unit, at)
            arrivals.relay(at)
            self.reducing.take(unit, at)
        else:  # frozen since the forward: torch calls, but has made none
            arrivals.owed.discard(at)
        self.gathering.prefetch_deferred(wait=False)
        if not (arrivals.owed or index in self._around):
            self.reduce(index)

    def _reduce_through(self, index: int) -> None:
        """The backward of this unit starts: reduce those before that have not all gradients on this
        rank, as of experts that others use. So all ranks reduce in one order: one around others,
        which may be whole before it or not, waits until here, or the end, and comes after these,
        whose numbers are higher. Experts that differ by rank lie in one unit: ranks that use
        different units raise CollectiveMismatch."""
        for unit in sorted(self.reducing.opened(), key=lambda unit: -unit.index):
            other = unit.index
            nested = self.gathering.are_nested(index, other)
            if not (nested or self._arrivals[other].may_come()):
                self.reduce(other)

    def reduce(self, index: int) -> None:
        """Unless it has been."""
        if self.reducing.is_open(self.units[index]):
            self.gathering.prefetch_deferred(wait=True)
            self.reducing.close(self.units[index])

    def end(self) -> None:
        """All gradients are made. Units that got some of theirs or none are reduced in one order on
        every rank, the root last."""
        assert self._now is not None
        units, reached, _ = self._now
        for index, unit in reversed(units.items()):
            if index not in reached:
                self.reducing.open(unit, keep=not self.sync)
            self.reduce(index)
        self._end(learn=True)
        for unit in units.values():
            self.reducing.hand_out(unit)

    def settle(self) -> None:
        """Clear what a backward that raised has left, once all it started has ended."""
        if self._now is None or (in_backward() and self._now.alive()):
            return
        self.gathering.prefetch_deferred(wait=True)
        self._end(learn=False)
        self.reducing.drop()
        for unit in self.units:
            for p in (*unit.parameters, *unit.computed):
                p.grad = None

    def _end(self, *, learn: bool) -> None:
        self.reducing.finish()
        self._now = None
        self.gathering.end_backward(learn=learn)
