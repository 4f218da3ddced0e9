"""Backward over an engine's units: gather weights, bucket gradients, reduce in one order.

Every backward reduces (except in `no_sync`) and adds to the gradients there were. A parameter
without a gradient in it counts as zero. A backward that raises loses the gradients accumulated so
far; the next forward or backward starts afresh. Stage 3 refuses `create_graph`.

A unit's backward starts at a gradient of its outputs, which it returns or leaves in attributes (see
`values.outputs`). If it has none, its backward starts at the first gradient of a parameter, which
is too late for stage 3 to gather the weights: an error of torch's (see Note [views outlive their
memory] in `unit`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ringdp.errors import CommunicationError, UsageError
from ringdp.parallel.autograd_state import in_backward, leaves_some_out
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.grad_hooks import UnitGradHooks
from ringdp.parallel.guards.resting import unguarded
from ringdp.parallel.reducing import Reducing
from ringdp.parallel.state import State
from ringdp.parallel.unit import FlatUnit


class _Backward(NamedTuple):
    """The running backward, or one that raised."""

    number: int  # torch's: of this backward, not of those nested in it
    trained: dict[int, FlatUnit]  # whose gradients it reduces
    reached: set[int]  # whose backward has started
    alive: Callable[[], object]  # weak reference to a callback that torch holds until it ends


class Backwards:
    """The backwards of one engine, one at a time. Handles of hooks are added to `handles`."""

    def __init__(self, gathering: Gathering, reducing: Reducing, handles: list[Any]) -> None:
        self.units, self.gathering, self.reducing = gathering.units, gathering, reducing
        self.sync = True  # False in no_sync
        self._through = -1  # torch's number of the last backward, which may run callbacks yet
        self._now: _Backward | None = None
        self._around = set[int]()  # units that enclose others, and are reduced after these
        me = weakref.proxy(self)  # torch holds it where the garbage collector cannot see it
        comes, made = lambda i, at: me.gradient_comes(i, at), lambda i, at: me.gradient_made(i, at)
        self._grad_hooks = [UnitGradHooks(unit, comes, made, handles) for unit in self.units]

    @property
    def running(self) -> bool:
        return self._now is not None

    def begin(self) -> None:
        """A new iteration begins, in which parameters may train that did not before: in stage 0
        also without a call of their unit's module."""
        for hooks in self._grad_hooks:
            hooks.register()

    def reach(self, indices: Sequence[int]) -> None:
        """The backward of a module starts, which has these units."""
        self.settle()
        for index in indices:
            self._reduce_through(index)
            self._prepare(index)

    def gradient_comes(self, index: int, at: int) -> None:
        """Prepare the unit if its outputs' hooks did not: a gradient penalty may bypass outputs,
        and the gradient of a weight that autocast has cast comes late."""
        self.settle()
        if self._has_reached(index) or self._grad_hooks[index].will_come(at):
            self._prepare(index)

    def recompute(self, index: int) -> None:
        """The unit's forward runs during backward: again (activation checkpointing), or without
        gradients, as where a hook of the user's evaluates the model, and no other backward ends."""
        again = torch.is_grad_enabled()
        if again:
            self._reduce_through(index)
        self._now = self._now or self._begin()
        self.use(index, frees=again)

    @unguarded
    def _prepare(self, index: int) -> None:
        unit = self.units[index]
        if self.reducing.comm.closed:
            if not (unit.freed or any(p.requires_grad for p in unit.parameters)):
                return  # it has all that its backward needs
            raise CommunicationError("the engine was closed, or aborted, before a backward ended")
        if self._has_reached(index):
            if unit.freed and index not in self.gathering.in_use:  # freed since, or recomputed
                self.use(index)
            return
        if unit.state is State.SUMMONED:
            if not self._trained():
                return  # to inputs only, and the weights are there
            raise UsageError(
                "backward within full_parameters(), where parameters are for reading only; allowed "
                "there: torch.autograd.grad"
            )
        if unit.freed and torch.is_grad_enabled():
            raise UsageError(
                "stage 3 frees weights that create_graph=True needs; use stage 2, as fully_shard "
                "does if all calls have reshard_after_forward=False"
            )
        self._now = now = self._now or self._begin()
        self.use(index)
        hooks, trains = self._grad_hooks[index], index in now.trained
        nested = torch._C._current_graph_task_id() != now.number
        if trains and nested and not hooks.any_comes():
            return  # in autograd.grad amid a recomputation: its gradients come later
        now.reached.add(index)
        if trains:
            hooks.begin_backward()
            self._open(unit)

    def _open(self, unit: FlatUnit) -> None:
        self.reducing.open(unit, keep=not (self.sync and unit.sync))

    def _begin(self) -> _Backward:
        units = {unit.index: unit for unit in self._trained()}
        self._around = set(self.gathering.groups[0]).union(*self.gathering.callers)
        self.gathering.begin_backward(amid=not units, again=not units and torch.is_grad_enabled())
        end = partial(self.end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        number = torch._C._current_graph_task_id()
        return _Backward(number, units, set(), weakref.ref(end))

    def _trained(self) -> list[FlatUnit]:
        """The units to reduce; none if this backward makes other gradients (`autograd.grad`, or
        `inputs=`). A unit frozen by now is reduced only if it has gradients of no_sync."""
        if not any(hooks.any_comes() for hooks in self._grad_hooks) and leaves_some_out():
            return []
        return [
            unit
            for unit in self.units
            if unit in self.reducing.unreduced
            or (unit.widths.trainable and any(p.requires_grad for p in unit.parameters))
        ]

    def _has_reached(self, index: int) -> bool:
        return self._now is not None and index in self._now.reached

    def use(self, index: int, *, frees: bool = True) -> None:
        """Gather the unit, for its forward, backward or recomputation. `frees` those before it."""
        self.gathering.prefetch_deferred(wait=True)
        if self._now and frees:
            self.gathering.free_before(index)
        self.gathering.use(index)
        self._grad_hooks[index].register()  # of what trains by now, and did not before

    def gradient_made(self, index: int, at: int) -> None:
        """Move it into the bucket; after the last one, reduce the unit."""
        unit, hooks = self.units[index], self._grad_hooks[index]
        hooks.pending.discard(at)
        if self.reducing.is_open(unit) or unit.computed[at].requires_grad:  # else .grad is older
            hooks.call_user_hooks(at)
            self.reducing.take(unit, at)
        self.gathering.prefetch_deferred(wait=False)
        if not (hooks.pending or index in self._around):
            self.reduce(index)

    def _reduce_through(self, index: int) -> None:
        """This unit's backward starts: reduce earlier units that will get no more gradients.

        They may lack some on this rank, as experts that other ranks use do. All ranks reduce in one
        order: a unit that encloses others waits until here, or the end of backward, and comes after
        the enclosed ones, whose numbers are higher. Experts that differ by rank must lie in one
        unit: ranks that use different units raise CollectiveMismatch.
        """
        for other in self.reducing.opened():
            nested = self.gathering.are_nested(index, other)
            if not (nested or self._grad_hooks[other].may_come()):
                self.reduce(other)

    def reduce(self, index: int) -> None:
        """Reduce the unit, unless it has been."""
        if self.reducing.is_open(self.units[index]):
            self.gathering.prefetch_deferred(wait=True)
            self.reducing.close(self.units[index])

    def end(self) -> None:
        """Autograd is through. Units that still lack gradients are reduced in one order on every
        rank, the root last; then all reductions are waited for."""
        assert self._now is not None
        self._through, units, reached, _ = self._now
        for index, unit in reversed(units.items()):
            if index not in reached:
                self._open(unit)
            self.reduce(index)
        self._end(learn=True)
        for unit in units.values():
            self.reducing.hand_out(unit)

    def check_over(self, what: str) -> None:
        """Raise UsageError, which begins with `what`, within a backward before its end here."""
        if in_backward() and torch._C._current_graph_task_id() != self._through:
            raise UsageError(
                f"{what} within backward, where gradients are not reduced yet and weights are "
                "gathered; do it after backward"
            )

    def settle(self) -> None:
        """Clean up after a backward that raised: wait for what it started, clear gradients."""
        if self._now is None or (in_backward() and self._now.alive()):
            return
        self.gathering.prefetch_deferred(wait=True)
        self.reducing.drop()
        for unit in self.units:
            for p in unit.computed:
                p.grad = None  # and that of its master
        self._end(learn=False)

    def _end(self, *, learn: bool) -> None:
        self.reducing.finish()
        self._now = None
        self.gathering.end_backward(learn=learn)
