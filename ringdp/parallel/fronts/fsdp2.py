"""`fully_shard` with torch's arguments: called on blocks first, then on the model.

A call on a module makes the modules inside it that were sharded before its units: it gathers them,
once, and shards everything anew. One engine has one precision and offload, so calls that ask for
different ones are an error. The modules of one call are units of one engine, whose model is a list
of them that nobody calls.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel.engine import Engine
from ringdp.parallel.entry import shard
from ringdp.parallel.fronts.full_tensor import FullTensor
from ringdp.parallel.mesh import device_of, move_to_ranks, of_mesh
from ringdp.parallel.meta import Init
from ringdp.parallel.offload import Offload
from ringdp.parallel.precision import Precision
from ringdp.parallel.refuse import MissingAttribute, checked_module, refuse
from ringdp.parallel.unit import FlatUnit, State

WHOLE = 1 << 62  # elements: a unit rule by which the model is one unit

Given = TypeVar("Given", bound=nn.Module | Sequence[nn.Module])


class Options(NamedTuple):
    """What was asked for of the modules of one call of `fully_shard`, by it or later."""

    modules: Sequence[Any]
    mp_policy: Precision
    offload_policy: str | None
    reshard_after_forward: bool
    gradient_divide_factor: float | None = None  # None: the number of ranks
    requires_gradient_sync: bool = True


class UnshardHandle(NamedTuple):
    """torch's name for what unshard(async_op=True) returns."""

    units: list[FlatUnit]

    def wait(self) -> None:
        """Wait until the parameters are whole. The module's forward does so too."""
        for unit in self.units:
            if unit.state is State.GATHERING:
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

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """No effect: shards have no replicas over a mesh of one dimension."""

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
        engine, units = self.engine, _units_of(self.engine, [self])
        engine.backwards.settle()
        engine.gathering.prefetch_deferred(wait=True)
        for unit in units:
            if unit.state is State.SHARDED:
                unit.gather(engine.gathering.comm)
        if async_op:
            return UnshardHandle(units)
        UnshardHandle(units).wait()
        return None

    def reshard(self) -> None:
        """Free what unshard() or a forward has gathered; backward gathers it again."""
        self.engine.backwards.settle()
        self.engine.gathering.reshard(_units_of(self.engine, [self]))

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
        for name, value in state.items() if "destination" not in kwargs else ():
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

    def _get_fsdp_state(self) -> NoReturn:
        """Called by the methods of torch's class that are not overridden here."""
        name = sys._getframe(1).f_code.co_name
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


def fully_shard(
    module: Given,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: object = None,
    mp_policy: Any = None,
    offload_policy: object = None,
    ignored_params: object = None,
    dp_mesh_dims: object = None,
    comm: Communicator | ProcessGroup | None = None,
    init: Init | None = None,
) -> Given:
    """Shard a module in place, as torch's does; call it on blocks before the model. Collective.

    module: a list stands for a call for each of its modules; each is gathered by itself.
    reshard_after_forward: False keeps the module's parameters from its forward to its backward, as
    stage 3 always does with the root's. If all calls have False (the model's may have None), that
    is stage 2: they are kept at all times. mp_policy, offload_policy: such as torch's
    (CPUOffloadPolicy offloads parameters and optimizer), the same for blocks and model. Without
    reduce_dtype gradients are reduced in the parameters' dtype, as in torch from 2.15 on. mesh: of
    one dimension; comm: an alternative. A model on the CPU moves to the current GPU if the mesh or
    group is of GPUs. init: as for `shard`; meta parameters are materialized by this call, not by
    to_empty() after it.
    Between steps a parameter is a flat slice, not a DTensor; state_dict() has whole tensors. Both
    have full_tensor().
    Raises UsageError for what is not implemented.
    """
    if not isinstance(reshard_after_forward, bool | None):
        raise UsageError(
            f"fully_shard: reshard_after_forward={reshard_after_forward!r} is not implemented; "
            "allowed: None, True or False"
        )
    refuse(
        "fully_shard",
        shard_placement_fn=(shard_placement_fn, None),
        ignored_params=(ignored_params, None),
        dp_mesh_dims=(dp_mesh_dims, None),
    )
    several = isinstance(module, list | tuple)
    modules: list[Any] = [*module] if several else [module]  # type: ignore[misc]
    for m in modules:
        _check_name(checked_module("fully_shard", m))
    if not modules:
        raise UsageError("fully_shard takes modules; this is an empty list")
    kind = type(offload_policy).__name__
    if kind not in ("NoneType", "OffloadPolicy", "CPUOffloadPolicy"):
        raise UsageError(f"fully_shard: offload_policy is a {kind}; allowed: torch's two")
    pins = getattr(offload_policy, "pin_memory", True)
    asked = Options(
        modules,
        _precision(mp_policy),
        repr(offload_policy) if kind == "CPUOffloadPolicy" else None,
        reshard_after_forward is not False,
    )
    whole = nn.ModuleList(modules) if several else modules[0]
    named = whole.named_modules()
    within = {n: m for n, m in named if isinstance(m, FSDPModule) and m not in modules}
    stage = _stage(within, asked, reshard_after_forward)
    inner: list[Any] = [*within.values()]
    units = [*inner, *modules] if several else inner
    take_in(inner)
    engine = shard(
        whole,
        stage=stage,
        unit=units.__contains__ if units else WHOLE,
        precision=_reduced(asked.mp_policy, whole),
        offload=Offload(stage == 3, optimizer=True, pin=pins) if asked.offload_policy else None,
        comm=move_to_ranks(whole, of_mesh(comm, mesh), device_of(mesh)),
        init=init,
    )
    engine.always_gathers_state = True
    for m in modules:
        if not isinstance(m, FSDPModule):
            m.__class__ = _sharded_class(type(m))
        type(m)._ringdp_asked = asked
    for m in (*modules, *inner):
        m.engine = engine
    for m in (*modules, *inner):
        _heed(m)
    return module


def _sharded_class(kind: type) -> Any:
    from torch.distributed.fsdp import FSDPModule as Torchs  # takes 0.5 s

    place = {"_orig_cls_mro_index": 3}  # of `kind`, for torch's __new__: model[:2] makes a `kind`
    return type(f"FSDP{kind.__name__}", (FSDPModule, Torchs, kind), place)


def _original(module: FSDPModule) -> Any:
    return type(module).__bases__[-1]


def _check_name(module: nn.Module) -> None:
    """Raise UsageError for a module that has something of its own under the name `engine`."""
    if "engine" in dir(module) and not isinstance(module, FSDPModule):
        raise UsageError(
            f"fully_shard: {type(module).__name__}.engine is the module's own, and ringdp keeps "
            "its engine there; give it another name, or use ringdp.shard"
        )


def _ask(module: Any, *, recurse: bool, **more: Any) -> None:
    """Ask for `more` of what was sharded in one call with the module, or with modules inside."""
    inner = [m for m in module.modules() if isinstance(m, FSDPModule)] if recurse else []
    calls = {id(m._ringdp_asked): m._ringdp_asked for m in (module, *inner)}
    for before in calls.values():
        asked = before._replace(**more)
        for m in asked.modules:
            type(m)._ringdp_asked = asked
            _heed(m)


def _heed(module: Any) -> None:
    """Make the engine do what is asked for of the module's own units."""
    engine, asked = module.engine, module._ringdp_asked
    kept = engine.gathering.kept
    for unit in _units_of(engine, [module]):
        unit.divisor = asked.gradient_divide_factor or engine.comm.size
        unit.sync = asked.requires_gradient_sync
        if asked.reshard_after_forward and module is not engine.model:
            kept.discard(unit.index)
        else:
            kept.add(unit.index)


def _units_of(engine: Engine, modules: Sequence[object]) -> list[FlatUnit]:
    return [u for u in engine.units if u.module in modules]


def _stage(within: dict[str, FSDPModule], asked: Options, reshard: bool | None) -> int:
    """3 if anything is to be resharded after its forward. Raises UsageError if calls on the modules
    inside, by name, asked for something else."""
    before = {name: m._ringdp_asked for name, m in within.items() if not m.engine.closed}
    for name, other in before.items():
        if other.mp_policy.output is None:  # only the model's output is cast
            policy = replace(other.mp_policy, output=asked.mp_policy.output)
            other = other._replace(mp_policy=policy)
        for argument in ("mp_policy", "offload_policy"):
            here, there = getattr(asked, argument), getattr(other, argument)
            if here != there:
                raise UsageError(
                    f"fully_shard: {argument} of module {name!r} was {there!r}, and is {here!r} of "
                    "the model, or of another module within; allowed: the same in every call"
                )
    own = reshard if before else asked.reshard_after_forward
    return 3 if own or any(other.reshard_after_forward for other in before.values()) else 2


def take_in(inner: Iterable[Any]) -> None:
    """Close the engines of modules sharded before, and make these whole. Collective."""
    for m in inner:
        if not m.engine.closed:
            with m.engine.full_parameters():
                m.engine.close()


def _precision(policy: Any) -> Precision:
    if policy is None:
        return Precision()
    if not hasattr(policy, "output_dtype"):
        raise UsageError(f"fully_shard: mp_policy={policy!r}; allowed: a MixedPrecisionPolicy")
    known = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    others = [f for f in fields(policy) if f.name not in known]
    refuse("MixedPrecisionPolicy", **{f.name: (getattr(policy, f.name), f.default) for f in others})
    param, reduce, output, casts = (getattr(policy, name) for name in known)
    return Precision(param, reduce, output, cast_inputs=casts)


def _reduced(precision: Precision, module: nn.Module) -> Precision:
    """With a reduce dtype, if parameters compute in another dtype than they have."""
    own = {p.dtype for p in module.parameters() if p.requires_grad}
    if precision.reduce or not (precision.param and own):
        return precision
    return replace(precision, reduce=functools.reduce(torch.promote_types, own))
