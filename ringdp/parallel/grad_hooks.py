"""Hooks that tell when a gradient comes, and when it is there, after all that the user's own hooks
have done to it; and whether one will come.

The user's may have been hung up since, and of one parameter they are called in their order. Where
masters are apart (see Note [masters apart]) autograd knows other parameters than the user does:
those take the hooks over.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from ringdp.errors import UsageError
from ringdp.parallel.unit import FlatUnit


class Waits(Protocol):
    """Who is told, of a unit by its index."""

    def gradient_comes(self, index: int, at: int) -> None: ...

    def gradient_made(self, index: int, at: int) -> None: ...


class Arrivals:
    """Of one unit. `who` is told before a gradient is put into .grad, and after it. It must not
    hold the unit: torch keeps it where no garbage collector looks. `handles`: what ends it.
    """

    def __init__(self, unit: FlatUnit, who: Waits, handles: list[Any]) -> None:
        self.unit, self.who, self._handles = unit, who, handles
        self._made: dict[int, Any] = {}  # our hooks, of the parameters that are heard
        self.owed: set[int] = set()  # gradients that the unit's backward has yet to make
        self.hear()

    def hear(self) -> None:
        """From now on, of the parameters that train by now."""
        unit, who, index = self.unit, self.who, self.unit.index
        for at in [at for at in range(len(unit.parameters)) if at not in self._made]:
            p, master = unit.computed[at], unit.parameters[at]
            if not p.requires_grad:
                continue
            unit.thaw()
            before = master.register_hook(lambda _, at=at: who.gradient_comes(index, at))  # type: ignore[no-untyped-call]
            if p is not master:
                p._backward_hooks = master._backward_hooks  # with what the user adds to it
            self._made[at] = p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, at=at: who.gradient_made(index, at)
            )
            self._handles += [before, self._made[at]]
            if p is not master:
                refuse = partial(_refuse, unit.plan.entries[at].name)
                handle = master.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def expect(self) -> None:
        """The unit's backward starts."""
        self._backward = torch._C._current_graph_task_id()  # they count up
        self.owed = {at for at, p in enumerate(self.unit.parameters) if p.requires_grad}
        for at, handle in self._made.items():
            hooks: Any = self.unit.computed[at]._post_accumulate_grad_hooks
            hooks[handle.id] = hooks.pop(handle.id)  # torch does not see move_to_end

    def may_come(self) -> bool:
        """Whether any gradient owed may still come in the backward that was expected. Another,
        under way within that one as reentrant checkpointing has it, cannot tell; one around it
        can: it has ended."""
        now = torch._C._current_graph_task_id()
        if now != self._backward:
            return now > self._backward
        return any(map(self.will_come, self.owed))

    def will_come(self, at: int) -> bool:
        """Whether the backward under way has yet to make this gradient. One of `autograd.grad`
        makes none."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                node = get_gradient_edge(self.unit.computed[at]).node
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError:  # frozen meanwhile; or autograd.grad, of this one
            return False

    def any_comes(self) -> bool:
        """Whether one of the gradients is yet to be made."""
        return any(self.will_come(at) for at in self._made if self.unit.computed[at].requires_grad)

    def relay(self, at: int) -> None:
        """One is there: call what the user has hung on a master, with the parameter that has it."""
        self.owed.discard(at)
        p, master = self.unit.computed[at], self.unit.parameters[at]
        hooks: Any = master._post_accumulate_grad_hooks
        if p is not master and hooks:
            for hook in list(hooks.values()):
                if getattr(hook, "func", None) is not _refuse:
                    hook(p)


def _refuse(name: str, _: object) -> None:
    raise UsageError(
        f"the loss was made of parameter {name} as it is at rest, where it computes in another "
        "dtype or place: its gradient would be lost. Take it from model.parameters() after the "
        "forward, or use it within its unit's"
    )
