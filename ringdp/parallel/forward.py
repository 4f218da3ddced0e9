"""Forward over an engine's units: gather weights, free them, and find where backward will start.

A call of the model begins an iteration, and one without gradients ends it, unless it runs within
another call: where the model calls itself, or is evaluated in a hook of its backward.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringdp.errors import UsageError
from ringdp.parallel.autograd_state import calls_of, in_backward, transformed
from ringdp.parallel.backward import Backwards
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.guards.copies import AddHook
from ringdp.parallel.values.outputs import UnitOutputs


class Forwards:
    """The forwards of one engine. `begin` is called before each iteration."""

    def __init__(
        self,
        model: nn.Module,
        gathering: Gathering,
        backwards: Backwards,
        begin: Callable[[], None],
    ) -> None:
        self.model, self.gathering, self.backwards, self._begin = model, gathering, backwards, begin

    def follow(
        self, module: nn.Module, indices: list[int], outputs: UnitOutputs, add_hook: AddHook
    ) -> None:
        """Add the hooks of a module with these units."""

        def before(*_: object) -> None:
            if not transformed(self._is_whole):
                outputs.enter()
                self.before(indices)
                outputs.begin()

        def after(_: nn.Module, args: Any, named: Any, output: Any) -> Any:
            if not transformed(self._is_whole):
                output, starts = outputs.returned(output, (*args, *named.values()))
                self.after(indices, starts)
            return output

        def end(*_: object) -> None:
            if outputs.end():
                self.raised(indices)

        add_hook(module.register_forward_pre_hook, before, prepend=True)
        add_hook(module.register_forward_hook, after, with_kwargs=True)
        add_hook(module.register_forward_hook, end, always_call=True)

    def before(self, indices: Sequence[int]) -> None:
        """Gather the units of a module that is called."""
        for index in indices if not self.gathering.summoned else ():
            self.backwards.settle()
            if in_backward() and (torch.is_grad_enabled() or self.backwards.running):
                self.backwards.recompute(index)
                self.gathering.forwards.append(index)
            else:
                alone = self._is_alone()
                if (index == 0 and not self._calls_itself()) or alone or self.gathering.over:
                    self._begin()
                    self.backwards.begin()
                    trains = torch.is_grad_enabled()
                    self.gathering.begin(foreseen=index == 0 or not alone, trains=trains)
                self.gathering.callers[index].update(self.gathering.in_use)
                self.gathering.forwards.append(index)  # before it waits, as other threads go on
                self.backwards.use(index)

    def after(self, indices: Sequence[int], starts: Sequence[Tensor]) -> None:
        """Free the units of a module that returns. `starts`: at whose gradients the backward of
        these units will start."""
        running = self.backwards.running
        if not self.gathering.summoned:
            recomputed = running and torch.is_grad_enabled()
            for index in indices:
                free = index not in self.gathering.kept and not recomputed
                self.gathering.done_with(index, free=free, again=not running)
        backwards = weakref.proxy(self.backwards)  # as the model may keep what it returns
        for t in starts:
            t.register_hook(lambda _: backwards.reach(indices))  # type: ignore[no-untyped-call]
        ends = (0 in indices and 0 not in self.gathering.forwards) or self._is_alone()
        if ends and not (starts or self.gathering.again or running):
            self.gathering.end(learn=False)

    def raised(self, indices: Sequence[int]) -> None:
        """A forward of theirs raised. What is in flight is not waited for: other ranks may not have
        raised, or elsewhere."""
        self.gathering.leave(indices)
        if not self.backwards.running:
            self.gathering.free(indices)

    def _calls_itself(self) -> bool:
        """Whether this call of the model is within another; one that Ctrl-C ended is in `forwards`,
        too. Raises UsageError if another thread's call runs."""
        if 0 not in self.gathering.forwards:
            return False
        stacks = sys._current_frames()
        if calls_of(self.model, stacks.pop(threading.get_ident())) > 1:
            return True
        if not self._is_whole() and any(calls_of(self.model, each) for each in stacks.values()):
            raise UsageError(
                "two threads call a sharded model at once, whose units are gathered for one call "
                "at a time. Call it from one thread, or within full_parameters()"
            )
        return False

    def _is_alone(self) -> bool:
        """Whether this call is in no unit's forward and will have no backward."""
        running = self.gathering.in_use or self.backwards.running
        return not (running or torch.is_grad_enabled())

    def _is_whole(self) -> bool:
        """Whether parameters are whole at all times, not only at rest."""
        return self.gathering.summoned or all(u.static for u in self.gathering.units)
