"""Steps of a sharded model's optimizers: what is called around them, and what they find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel.guards import resting, sliced
from ringdp.parallel.optimizer.kinds import needs_whole
from ringdp.parallel.optimizer.whole import WholeStep
from ringdp.parallel.state import State
from ringdp.parallel.unit import FlatUnit


class Stepped(Protocol):
    """An engine. The optimizer's own step hooks, which are the user's, run between `before_step`
    and `stepping.enter`, and after `stepping.leave`."""

    @property
    def stepping(self) -> Stepping: ...

    def before_step(self, optimizer: Optimizer) -> bool:
        """Returns whether it steps parameters of the engine: then `stepping.enter` must follow."""


def listen(engine: Stepped) -> list[Any]:
    """Calls these around every step of any optimizer, until the returned handles are removed from
    their list. Each optimizer keeps two hooks, without effect by then: a hook of the user's may
    close the engine, and torch's loop over hooks allows no removal.

    A closure that the step is given runs between a `stepping.leave` and a `before_step`. In a step
    that is compiled they run between graphs, which cannot hold a change of a parameter's class.
    """
    handles: list[Any] = []
    own = WeakKeyDictionary[Optimizer, tuple[Any, Any]]()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def enter(optimizer: Optimizer, *_: object) -> None:
        if handles:
            engine.stepping.enter(optimizer)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def leave(optimizer: Optimizer, *_: object) -> None:
        if handles:
            engine.stepping.leave(optimizer)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def begin(optimizer: Optimizer, args: Any, named: dict[str, Any]) -> Any:
        def wrapped(given: Any) -> Any:
            if not callable(given):
                return given

            def closure() -> Any:
                leave(optimizer)
                loss = given()
                if handles and engine.before_step(optimizer):
                    enter(optimizer)
                return loss

            return closure

        if not engine.before_step(optimizer):
            return None
        if optimizer not in own:
            pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
            own[optimizer] = pre(enter), post(leave)
        last, first = own[optimizer]  # the user's are between this global hook and these two
        hooks: Any = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        hooks[0].move_to_end(last.id)
        hooks[1].move_to_end(first.id, last=False)
        return tuple(map(wrapped, args)), {name: wrapped(x) for name, x in named.items()}

    handles.append(register_optimizer_step_pre_hook(begin))
    return handles


def has_any(optimizer: Optimizer, units: Sequence[FlatUnit]) -> bool:
    """Whether it steps parameters of these units. Raises UsageError if it has their temporary
    parameters instead, which exist only from forward to backward."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    ours = {id(p) for unit in units for p in unit.parameters}
    passing = {id(p) for u in units if u.apart for p in u.computed}  # See Note [masters apart]
    if not stepped.isdisjoint(passing):
        raise UsageError(
            "the optimizer was made between a forward and the end of its backward, of parameters "
            "that are there only meanwhile, where they compute in another dtype or place than they "
            "rest in. Make it before the forward, or after backward"
        )
    return not stepped.isdisjoint(ours)


def refuse_within() -> NoReturn:
    raise UsageError(
        "an optimizer steps within full_parameters(); step it after that. If it was a function of "
        "torch's, such as set_state_dict, which steps one that has no state yet, call the "
        "optimizer's own state_dict() or load_state_dict()"
    )


class Stepping:
    """What units' parameters are while an optimizer steps them."""

    def __init__(self, comm: Communicator, units: Sequence[FlatUnit]) -> None:
        self.comm, self.units = comm, units
        self._whole: WholeStep | None = None
        # parameters with elements on other ranks only, and their gradients
        self._emptied: list[tuple[nn.Parameter, Tensor]] = []

    def begin(self) -> None:
        """Before the user's hooks: undo what a step that raised has left."""
        self.undo(again=True)
        self._restore()

    def enter(self, optimizer: Optimizer) -> None:
        """Make parameters and gradients ordinary tensors, whole ones if the optimizer needs these
        (then this is collective), and take away gradients of those with elements on other ranks
        only, for which it would keep state."""
        for unit in self.units:
            resting.become(unit.parameters, nn.Parameter)
            entries = unit.plan.entries if unit.slices else ()
            for p, entry in zip(unit.parameters, entries, strict=False):
                if isinstance(p.grad, sliced.Slice):
                    p.grad.__class__ = Tensor  # type: ignore[assignment]
                if p.grad is not None and entry.elements and not p.numel():
                    self._emptied.append((p, p.grad.new_empty(0)))  # which holds no memory
                    p.grad = None
        if self.units[0].slices and needs_whole(optimizer):
            self._whole = WholeStep(self.comm, self.units, optimizer)

    def leave(self, optimizer: Optimizer) -> None:
        """Make them slices at rest. Every rank has gradients of the same parameters again, for
        their norms."""
        if self._whole and self._whole.optimizer is optimizer:
            self._whole.end()
            self._whole = None
        self._restore()

    def undo(self, *, again: bool = False) -> None:
        """If a step of whole parameters raised, they are slices again. See `WholeStep.undo`."""
        if self._whole:
            self._whole.undo(again=again)
            self._whole = None

    def _restore(self) -> None:
        while self._emptied:
            p, gradient = self._emptied.pop()
            increment_version(p)  # as on ranks where it is not empty
            if p.grad is None:
                p.grad = gradient
        for unit in self.units:
            if unit.state is State.SHARDED and unit.slices:
                resting.become(unit.parameters, resting.ShardedParam)
