"""`fully_shard` with torch's arguments: called on blocks first, then on the model.

A call on a module makes the modules inside it that were sharded before its units: it gathers them,
once, and shards everything anew. One engine has one offload, so calls that ask for different ones
are an error. The modules of one call are units of one engine, whose model is a list of them that
nobody calls.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.kernels.precision import FLOATS
from ringdp.parallel.engine import Engine
from ringdp.parallel.entry import check_size, shard
from ringdp.parallel.fronts.fsdp_module import FSDPModule, Options, heed, sharded_class
from ringdp.parallel.mesh import move_to_ranks, with_replicas
from ringdp.parallel.meta import Init
from ringdp.parallel.offload import Offload
from ringdp.parallel.precision import Precision
from ringdp.parallel.refuse import checked_module, refuse
from ringdp.parallel.replicas import gather_json
from ringdp.parallel.units import lacks_forward
from ringdp.parallel.values.outputs import own_modules

Given = TypeVar("Given", bound=nn.Module | Sequence[nn.Module])
# Engines that calls have closed, and not the user. A call that has failed since may be repeated.
_TAKEN_IN = WeakSet[Engine]()


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
    is stage 2: they are kept at all times. A number of ranks, the same in all calls that have one,
    is a reshard_size of `shard`. mp_policy: such as torch's; without reduce_dtype gradients are
    reduced in the parameters' dtype, as in torch from 2.15 on. offload_policy: such as torch's
    (CPUOffloadPolicy offloads parameters and optimizer), the same for blocks and model. mesh: of
    one dimension, or of two, replicas and shards; comm: an alternative. A model on the CPU moves to
    the current GPU if the mesh or group is of GPUs. init: as for `shard`; meta parameters are
    materialized by this call, not by to_empty() after it.
    Between steps a parameter is a flat slice, not a DTensor; state_dict() has whole tensors. Both
    have full_tensor().
    Raises UsageError for what is not implemented.
    """
    if not isinstance(reshard_after_forward, bool | int | None):
        raise UsageError(
            f"fully_shard: reshard_after_forward={reshard_after_forward!r}; allowed: None, True, "
            "False or a number of ranks"
        )
    if type(reshard_after_forward) is int and reshard_after_forward == 1:
        reshard_after_forward = False  # one rank keeps all
    refuse(
        "fully_shard",
        shard_placement_fn=(shard_placement_fn, None),
        ignored_params=(ignored_params, None),
        dp_mesh_dims=(dp_mesh_dims, None),
    )
    several = isinstance(module, list | tuple)
    modules: list[Any] = [*module] if several else [module]  # type: ignore[misc]
    for m in modules:
        _check_module(checked_module("fully_shard", m))
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
        True if reshard_after_forward is None else reshard_after_forward,
    )
    whole = nn.ModuleList(modules) if several else modules[0]
    named = whole.named_modules()
    within = {n: m for n, m in named if isinstance(m, FSDPModule) and m not in modules}
    live = {n: m for n, m in within.items() if not m.engine.closed or m.engine in _TAKEN_IN}
    stage = _stage(live, asked, reshard_after_forward)
    asked_of = {m: m._ringdp_asked for m in live.values()} | dict.fromkeys(modules, asked)
    reshard_size = _reshard_size(asked_of.values())
    inner: list[Any] = [*within.values()]
    group, shard_size, gpu = with_replicas(comm, mesh)
    ranks = take_in(live.values(), whole, group, shard_size, gpu)
    if reshard_size is not None:
        check_size("fully_shard: reshard_after_forward", reshard_size, shard_size or ranks.size)
    engine = shard(
        whole,
        stage=stage,
        unit={*inner, *modules},
        precision={m: _reduced(m, asked_of) for m in asked_of},
        offload=Offload(stage == 3, optimizer=True, pin=pins) if asked.offload_policy else None,
        comm=ranks,
        shard_size=shard_size,
        reshard_size=reshard_size,
        init=init,
    )
    engine.always_gathers_state = True
    for m in modules:
        if not isinstance(m, FSDPModule):
            m.__class__ = sharded_class(type(m))
        type(m)._ringdp_asked = asked
    for m in (*modules, *inner):
        m.engine = engine
    for m in (*modules, *inner):
        heed(m)
    return module


def _check_module(module: nn.Module) -> None:
    """Raise UsageError for a container without forward, and for a module that has something of its
    own under the name `engine`."""
    if lacks_forward(module):
        raise UsageError(
            f"fully_shard: a {type(module).__name__} has no forward, before which it could be "
            "gathered; give a list of the modules in it, or the module around it"
        )
    if "engine" in dir(module) and not isinstance(module, FSDPModule):
        raise UsageError(
            f"fully_shard: {type(module).__name__}.engine is the module's own, and ringdp keeps "
            "its engine there; give it another name, or use ringdp.shard"
        )


def _stage(inner: dict[str, FSDPModule], asked: Options, reshard: int | None) -> int:
    """3 if anything is to be resharded after its forward. Raises UsageError if calls on the modules
    inside, by name, asked for something else."""
    before = {name: m._ringdp_asked for name, m in inner.items()}
    for name, other in before.items():
        here, there = asked.offload_policy, other.offload_policy
        if here != there:
            raise UsageError(
                f"fully_shard: offload_policy of module {name!r} was {there!r}, and is {here!r} of "
                "the model, or of another module within; allowed: the same in every call"
            )
    own = reshard if before else asked.reshard_after_forward
    return 3 if own or any(other.reshard_after_forward for other in before.values()) else 2


def _reshard_size(each: Iterable[Options]) -> int | None:
    """The one number of ranks that calls asked for. Raises UsageError if there are several."""
    sizes = {n for asked in each if type(n := asked.reshard_after_forward) is int}
    if len(sizes) > 1:
        raise UsageError(
            f"fully_shard: reshard_after_forward is {sorted(sizes)} in calls for one model; "
            "allowed: one number of ranks, beside True and False"
        )
    return sizes.pop() if sizes else None


def take_in(
    inner: Iterable[Any],
    model: nn.Module,
    ranks: Communicator | ProcessGroup | None,
    shard_size: int | None,
    device: torch.device | None,
) -> Communicator:
    """Close the engines of modules sharded before, and make these whole. Returns the communicator
    for the model with them (see `move_to_ranks`). Collective."""
    before: dict[Communicator, None] = {}
    sizes = set[int]()
    for m in inner:
        if not m.engine.closed:
            before[m.engine.comm] = None
            sizes.add(m.engine.shards.size)
            with m.engine.full_parameters():
                m.engine.close()
            _TAKEN_IN.add(m.engine)
    comm = move_to_ranks(model, ranks, device)
    before.pop(comm, None)
    _check_same(before, comm)
    if others := sizes - {shard_size or comm.size}:
        raise UsageError(
            f"modules within were sharded over each {min(others)} of {comm.size} ranks, the model "
            f"is over each {shard_size or comm.size}; allowed: the same mesh or groups in all calls"
        )
    return comm


def _check_same(before: Iterable[Communicator], comm: Communicator) -> None:
    """Raise UsageError, on every rank of `comm`, unless all have its ranks, in any order.
    Collective over all."""
    mine = []
    for other in before:
        name = torch.tensor([secrets.randbits(62)], device="cpu")
        other.broadcast(name)
        mine.append([name.item(), other.size])
    members: dict[tuple[int, int], list[int]] = {}
    for rank, each in enumerate(gather_json(comm, mine)):
        for name, size in each:
            members.setdefault((name, size), []).append(rank)
    for (_, size), known in members.items():
        if not size == len(known) == comm.size:
            raise UsageError(
                f"modules within were sharded over {size} ranks; of the model's {comm.size}, these "
                f"are among them: {known}; allowed: the same ranks for all of a model"
            )


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


def _reduced(module: nn.Module, asked_of: Mapping[nn.Module, Options]) -> Precision:
    """The module's, with a reduce dtype, if its own parameters compute in another dtype than they
    have."""
    precision = asked_of[module].mp_policy
    parameters = [p for m in own_modules(module, asked_of) for p in m.parameters(recurse=False)]
    floats = [p for p in parameters if p.dtype in FLOATS]  # others are refused
    own = {p.dtype for p in floats if p.requires_grad} or {p.dtype for p in floats}
    if precision.reduce or not (precision.param and own):
        return precision
    return replace(precision, reduce=functools.reduce(torch.promote_types, own))
