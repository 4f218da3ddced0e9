"""The methods that `fully_shard` gives a module, with torch's names.

They change what was asked for of the modules of one call, or when these are gathered and freed.
"""

from __future__ import annotations

import copy
import copyreg
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from ringdp.errors import UsageError
from ringdp.parallel.engine import Engine
from ringdp.parallel.fronts.forward_method import AroundMethod
from ringdp.parallel.fronts.full_tensor import FullTensor
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.precision import Precision
from ringdp.parallel.refuse import MissingAttribute
from ringdp.parallel.state import State
from ringdp.parallel.unit import FlatUnit
from ringdp.parallel.values.outputs import own_modules


class Options(NamedTuple):
    """What was asked for of the modules of one call of `fully_shard`, by it or later."""

    modules: Sequence[Any]
    mp_policy: Precision
    offload_policy: str | None
    reshard_after_forward: bool | int
    gradient_divide_factor: float | None = None  # None: the number of ranks
    requires_gradient_sync: bool = True


class UnshardHandle(NamedTuple):
    """torch's name for what unshard(async_op=True) returns."""

    units: list[FlatUnit]
    gathering: Gathering

    def wait(self) -> None:
        """Wait until the parameters are whole. The module's forward does so too."""
        for unit in self.units:
            if unit.state is State.GATHERING:
                self.gathering.start(unit)
                unit.unshard()


class FSDPModule:
    """The methods that `fully_shard` adds to a module's class, in place of torch's of this name.
    torch's is a base, too, since scripts and libraries ask for it."""

    engine: Engine  # of the model that `fully_shard` was called on last
    _ringdp_asked: Options

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards reduce gradients of what was sharded in one call with this module, and,
        with `recurse`, with modules inside; if not, they accumulate as in `Engine.no_sync`."""
        _ask(self, recurse=recurse, requires_gradient_sync=requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: here every backward waits for its reductions, with the same sums."""

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """No effect: what stage 3 frees it frees after each backward, and gathers again."""

    def set_post_optim_event(self, event: object) -> None:
        """No effect: gathers wait for all that the current stream has been given."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """No effect: every backward's sums go over replicas, too. Those of several backwards are
        the same but for rounding."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: gradients are divided, then summed, in any case."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the gradients of what was sharded in one call with this module by this, and not by
        the number of ranks. With 1 they are summed."""
        number = isinstance(factor, int | float) and math.isfinite(factor) and factor != 0
        if not number:
            raise UsageError(f"set_gradient_divide_factor({factor!r}): allowed: a number but 0")
        _ask(self, recurse=False, gradient_divide_factor=float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether stage 3 frees between forward and backward what was sharded in one call with this
        module, and, with `recurse`, with modules inside. (It never frees the root's parameters.)"""
        if not isinstance(reshard_after_forward, bool):
            raise UsageError(
                f"set_reshard_after_forward({reshard_after_forward!r}): allowed: True or False"
            )
        if reshard_after_forward and not self.engine.stage.freed:
            raise UsageError(
                "set_reshard_after_forward(True), but every call of fully_shard had "
                "reshard_after_forward=False, so that nothing is freed; leave it out in one"
            )
        _ask(self, recurse=recurse, reshard_after_forward=reshard_after_forward)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's parameters, without those of inner sharded modules, ahead of its
        forward or for use outside it. Collective."""
        handle = UnshardHandle(_units_with(self), self.engine.gathering)
        self.engine.backwards.settle()
        handle.gathering.prefetch_deferred(wait=True)
        for unit in handle.units:
            handle.gathering.start(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free what unshard() or a forward that is over has gathered; backward gathers it again."""
        self.engine.backwards.settle()
        gathering = self.engine.gathering
        gathering.reshard([u for u in _units_with(self) if u.index not in gathering.forwards])

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Allow prefetching as many bytes as these modules have. (The engine predicts the order
        itself.)"""
        if others := [type(m).__name__ for m in modules if not isinstance(m, FSDPModule)]:
            raise UsageError(f"modules to prefetch: fully_shard has not sharded {others[0]}")
        gathering = self.engine.gathering
        ahead = sum(u.bytes for u in _units_of(self.engine, modules))
        gathering.limit = max(gathering.limit, ahead)

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """A whole copy; that of its optimizer is whole too, once it has stepped. So
        torch.distributed.checkpoint.state_dict gets and sets both. Collective."""
        with self.engine.full_parameters():
            state: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        for name, value in state.items() if kwargs.get("destination") is None else ():
            if type(value) is Tensor:
                state[name] = value.as_subclass(FullTensor)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a whole state_dict, the same on every rank. Collective."""
        with self.engine.full_parameters(write=True):
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def to_empty(self, **_: object) -> NoReturn:
        """Not needed: fully_shard materializes meta parameters itself."""
        instead = "reset_parameters, which fully_shard calls, or its init="
        raise MissingAttribute("fully_shard", "to_empty", instead)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return _original(self)._apply(self, *args, **kwargs)  # not torch's, which reshards

    def _get_fsdp_state(self) -> AroundMethod:
        """Called by torch's functions, and by methods of its class that are not overridden here."""
        caller = sys._getframe(1).f_code.co_qualname
        name, *_ = caller.removeprefix("FSDPModule.").split(".")
        if name == "register_fsdp_forward_method":
            return AroundMethod()
        raise MissingAttribute(
            "fully_shard", name, "ringdp.shard, whose arguments tell what is done when"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module's original class; see `guards.copies`."""
        kind, engine = type(self), vars(self).pop("engine")
        self.__class__ = _original(self)
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__, self.engine = kind, engine

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the original class, as no pickle can name this one. Then copy.copy makes one, and
        pickle and torch.save reach the engine, which says what to use instead."""
        made: Any = super().__reduce_ex__(protocol)
        if made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made  # as a user's class says
        (_, *arguments), original = made[1], _original(self)
        return original.__new__, (original, *arguments), *made[2:]


def _ask(module: Any, *, recurse: bool, **more: Any) -> None:
    """Ask for `more` of what was sharded in one call with the module, or with modules inside."""
    inner = [m for m in module.modules() if isinstance(m, FSDPModule)] if recurse else []
    calls = {id(m._ringdp_asked): m._ringdp_asked for m in (module, *inner)}
    for before in calls.values():
        asked = before._replace(**more)
        for m in asked.modules:
            type(m)._ringdp_asked = asked
            heed(m)


def heed(module: Any) -> None:
    """Make the engine do what is asked for of the module's own units."""
    engine, asked = module.engine, module._ringdp_asked
    kept = engine.gathering.kept
    for unit in _units_of(engine, [module]):
        unit.divisor = asked.gradient_divide_factor or engine.comm.size
        unit.sync = asked.requires_gradient_sync
        some = type(asked.reshard_after_forward) is int
        unit.piece.near = engine.ledger.ranks.near if some else None
        if asked.reshard_after_forward and module is not engine.model:
            kept.discard(unit.index)
        else:
            kept.add(unit.index)


def _units_of(engine: Engine, modules: Sequence[object]) -> list[FlatUnit]:
    return [u for u in engine.units if u.module in modules]


def _units_with(module: Any) -> list[FlatUnit]:
    """The units of its parameters, without those of inner sharded modules. Shared parameters are
    the model's."""
    inner: list[Any] = [m for m in module.modules() if isinstance(m, FSDPModule)]
    own = {*own_modules(module, inner)}
    return [u for u in module.engine.units if any(at.module in own for p in u.places for at in p)]


def sharded_class(kind: type) -> Any:
    from torch.distributed.fsdp import FSDPModule as Torchs  # takes 0.5 s

    place = {"_orig_cls_mro_index": 3}  # of `kind`, for torch's __new__: model[:2] makes a `kind`
    return type(f"FSDP{kind.__name__}", (FSDPModule, Torchs, kind), place)


def _original(module: FSDPModule) -> Any:
    return type(module).__bases__[-1]
