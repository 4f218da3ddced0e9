"""Hooks on a unit's parameters: before a gradient is accumulated, and after it is in .grad.

The second runs after the user's hooks on the same parameter, even those registered later. Where
masters are apart (see Note [masters apart]) the user's hooks are on the masters, while autograd
accumulates into other parameters; these take the user's hooks over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ringdp.errors import UsageError
from ringdp.parallel.guards.resting import unguarded
from ringdp.parallel.unit import FlatUnit

Call = Callable[[int, int], None]  # (the unit's index, the parameter's in it)


class UnitGradHooks:
    """The hooks of one unit. Their handles are added to `handles`.

    `comes`: called when autograd has a gradient, which is not yet in .grad; `made`: when it is, and
    the user's hooks have run. torch holds both where the garbage collector cannot see them: they
    must not own the unit.
    """

    def __init__(self, unit: FlatUnit, comes: Call, made: Call, handles: list[Any]) -> None:
        self.unit, self._comes, self._made, self._handles = unit, comes, made, handles
        # parameter -> our post-accumulate hook: its handle, and what it calls
        self._ours: dict[int, tuple[Any, Callable[[Tensor], None]]] = {}
        self.pending: set[int] = set()  # parameters whose gradients this backward has yet to make
        self.register()

    @unguarded
    def register(self) -> None:
        """Add hooks to parameters that train and have none yet."""
        unit, index, comes, made = self.unit, self.unit.index, self._comes, self._made
        for at in [at for at in range(len(unit.parameters)) if at not in self._ours]:
            p, master = unit.computed[at], unit.parameters[at]
            if not master.requires_grad:
                continue
            unit.thaw()
            p.requires_grad_()
            before = master.register_hook(lambda _, at=at: comes(index, at))  # type: ignore[no-untyped-call]
            if p is not master:
                p._backward_hooks = master._backward_hooks  # one dict: hooks added to either run

            def after(_: Tensor, at: int = at) -> None:
                made(index, at)

            handle = p.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
            self._ours[at] = handle, after
            self._handles += [before, handle]
            if p is not master:
                refuse = partial(_refuse, unit.plan.entries[at].name)
                handle = master.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def begin_backward(self) -> None:
        """The unit's backward starts: all its gradients are pending, and our hooks go last."""
        self._backward = torch._C._current_graph_task_id()  # increases with every backward
        self.pending = {at for at, p in enumerate(self.unit.parameters) if p.requires_grad}
        for at, (handle, after) in self._ours.items():
            hooks: Any = self.unit.computed[at]._post_accumulate_grad_hooks
            hooks.pop(handle.id, None)  # None: it was gone, by Ctrl-C between these two lines
            hooks[handle.id] = after  # torch does not see move_to_end

    def may_come(self) -> bool:
        """Whether a pending gradient may still be made by the unit's backward.

        A backward nested in that one (reentrant checkpointing) does not know: True. One that
        encloses it does: the unit's backward has ended.
        """
        now = torch._C._current_graph_task_id()
        if now != self._backward:
            return now > self._backward  # a nested backward starts later
        return any(map(self.will_come, self.pending))

    def will_come(self, at: int) -> bool:
        """Whether the running backward has yet to make it. `autograd.grad` makes none."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                node = get_gradient_edge(self.unit.computed[at]).node
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError:  # frozen since, or an input of autograd.grad
            return False

    def any_comes(self) -> bool:
        """Whether the running backward has yet to make any of the gradients."""
        return any(self.will_come(at) for at in self._ours if self.unit.computed[at].requires_grad)

    def call_user_hooks(self, at: int) -> None:
        """A gradient was made: call the user's post-accumulate hooks, if they are on a master."""
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
