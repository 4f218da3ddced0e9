"""Hooks that tell when autograd has made a gradient, after all that the user's own have done to it.

The user's may have been hung up since, and of one parameter they are called in their order. Where
masters are apart (see Note [masters apart]) autograd knows other parameters than the user does:
those take the hooks over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ringdp.errors import UsageError
from ringdp.parallel.unit import FlatUnit


class Arrivals:
    """Of one unit. `made` is called with the place of a parameter in it. It must not hold the unit:
    torch keeps it where no garbage collector looks.
    """

    def __init__(self, unit: FlatUnit, made: Callable[[int], None]) -> None:
        self.unit = unit
        self.handles = {
            at: p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, at=at: made(at)
            )
            for at, p in enumerate(unit.computed)
            if p.requires_grad
        }
        self.strays = {
            at: p.register_post_accumulate_grad_hook(partial(_refuse, unit.plan.entries[at].name))  # type: ignore[no-untyped-call]
            for at, p in enumerate(unit.parameters)
            if p.requires_grad and p is not unit.computed[at]
        }

    def expect(self) -> None:
        """The unit's backward starts."""
        for at, handle in self.handles.items():
            p, master = self.unit.computed[at], self.unit.parameters[at]
            if p is not master and (master._backward_hooks or p._backward_hooks):
                p._backward_hooks = master._backward_hooks
            hooks: Any = p._post_accumulate_grad_hooks
            hooks[handle.id] = hooks.pop(handle.id)  # torch does not see move_to_end

    def relay(self, at: int) -> None:
        """Call what the user has hung on a master, with the parameter that has the gradient."""
        p, master = self.unit.computed[at], self.unit.parameters[at]
        hooks: Any = master._post_accumulate_grad_hooks
        if p is not master and hooks:
            for key, hook in list(hooks.items()):
                if at not in self.strays or key != self.strays[at].id:
                    hook(p)


def _refuse(name: str, _: object) -> None:
    raise UsageError(
        f"the loss was made of parameter {name} as it is at rest, where it computes in another "
        "dtype or place: its gradient would be lost. Take it from model.parameters() after the "
        "forward, or use it within its unit's"
    )
