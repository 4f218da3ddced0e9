"""`shard`: the entry point of all stages. Checks its arguments and builds the units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ringdp.comm import Communicator, communicator_of
from ringdp.errors import UsageError
from ringdp.parallel import meta
from ringdp.parallel.accounting.memory import Ledger
from ringdp.parallel.engine import Engine
from ringdp.parallel.guards import copies, resting
from ringdp.parallel.guards.computed import places
from ringdp.parallel.layout import layout
from ringdp.parallel.offload import Offload
from ringdp.parallel.precision import (
    ModuleRule,
    Precision,
    Precisions,
    check_precisions,
    check_rule,
    matches,
)
from ringdp.parallel.ranks import ranks_of
from ringdp.parallel.replicas import broadcast, check_equal, check_writable, facts_of
from ringdp.parallel.stages import Stage, stage_of
from ringdp.parallel.tracing.engine import EngineTracer
from ringdp.parallel.unit import FlatUnit
from ringdp.parallel.units import UnitRule, UnitSpec, find_units
from ringdp.parallel.values.inputs import cast_at, move_inputs
from ringdp.tape import recorder


def shard(
    model: nn.Module,
    *,
    stage: int,
    unit: UnitRule = None,
    precision: Precision | Precisions | None = None,
    offload: Offload | None = None,
    comm: Communicator | ProcessGroup | None = None,
    shard_size: int | None = None,
    reshard_size: int | None = None,
    prefetch_bytes: int | None = None,
    persist_below: int = 0,
    keep: ModuleRule | None = None,
    overlap: bool = True,
    init: meta.Init | None = None,
) -> Engine:
    """Train `model` over the ranks of `comm`, in place. Collective.

    stage: 0 DDP, 1 ZeRO-1, 2 ZeRO-2, 3 ZeRO-3 (see `stages`). unit: which modules are gathered and
    reduced together: a class, several, a predicate, or a number of elements (see `find_units`).
    precision: dtypes in forward, backward and reductions; or a dict of modules and theirs, each for
    all within its module that has none of its own. offload: what rests in host memory. comm: a
    communicator or a torch.distributed group; by default what `ringdp.init` made last, or else
    torch's default group. shard_size: how many ranks hold a model together, by default all; with
    fewer, which must divide them, the others hold replicas (see `ranks`). reshard_size: how many of
    these gather a unit for its backward in stage 3, from pieces that they have kept since its
    forward; by default all, from their shards. prefetch_bytes: what stage 3 may gather ahead of its
    use; by default one unit, the largest. persist_below: parameters of fewer elements stay gathered
    from the model's forward to the end of its backward. keep: modules (a class, several, or a
    predicate) whose units stage 3 does not free between their forward and their backward. overlap:
    without it nothing is gathered ahead, and every reduction is waited for at once; the bits are
    the same. init: fills the modules of a model on the meta device (see `meta`).

    Parameters and buffers take rank 0's values; existing gradients are dropped. From stage 1 on a
    parameter is, between steps, the flat slice that this rank owns, possibly empty: create the
    optimizer after this call (not LBFGS) on `model.parameters()`. After
    `loss.backward()` the gradients are averaged over the ranks.

    Raises UsageError for an argument, or a model that cannot be sharded; ModelError where the
    ranks' models differ.

    Beside its shards and activations, stage 3 holds at most: two gathered units (with
    `prefetch_bytes`, the largest one and that many bytes; with `keep`, these, too; with
    `reshard_size`, a piece of each), a gradient bucket as large as a unit (two over a network, on a
    GPU, or in a wider dtype than the gathered parameters), and the weights and gradients of the
    root, which has all parameters that lie in no unit. `Engine.memory_formula` gives the exact
    bytes.
    """
    _check(model, nn.Module, "model")
    _check(precision, Precision | dict | None, "precision")
    _check(offload, Offload | None, "offload")
    _check(init, Callable | None, "init")
    _check(shard_size, int | None, "shard_size")
    _check(reshard_size, int | None, "reshard_size")
    if keep is not None:
        check_rule("keep", keep)
    if torch.is_inference_mode_enabled():
        raise UsageError(
            "shard within torch.inference_mode(), where it can make no tensor that trains; call it "
            "outside of that"
        )
    copies.check(model)
    check_writable((*model.named_parameters(), *model.named_buffers()))
    ahead = 0 if prefetch_bytes is None else prefetch_bytes
    for name, value in (("prefetch_bytes", ahead), ("persist_below", persist_below)):
        if type(value) is not int or value < 0:
            raise UsageError(f"{name} is {value!r}; it must be an int of at least 0")
    row, offload = stage_of(stage), offload or Offload()
    precisions = precision if isinstance(precision, dict) else {model: precision or Precision()}
    check_precisions(model, precisions)
    meta.check(model, init)
    comm = communicator_of(comm, model.parameters())
    size = comm.size if shard_size is None else shard_size
    near = size if reshard_size is None else reshard_size
    found, chosen = find_units(model, unit, persist_below=persist_below, precisions=precisions)
    kept = {at for at, f in enumerate(found) if keep is not None and matches(f.module, keep)}
    of = {
        p: {"unit": f.name or "root", "stage": stage, "shard_size": size, "reshard_size": near}
        | {"keep": at in kept}
        for at, f in enumerate(found)
        for _, p in f.parameters
    }
    facts = [(n, facts_of(p) | {"name": n} | of[p]) for n, p in model.named_parameters()]
    check_equal(comm, facts, "shard")
    # only now: where the ranks' arguments differ, some might raise alone
    offload.check(row)
    check_size("shard_size", size, comm.size)
    if size < comm.size and not row.slices:
        raise UsageError(f"shard_size={size} in stage 0, which shards nothing; it needs 1, 2 or 3")
    check_size("reshard_size", near, size)
    if near < size and not row.freed:
        raise UsageError(f"reshard_size={near} in stage {stage}, which frees no unit; it needs 3")
    if keep is not None and not kept:
        kinds = ", ".join(sorted({type(f.module).__name__ for f in found}))
        raise UsageError(f"keep={keep!r} matches no unit; the units are of {kinds}")
    if near == 1 < size:  # a rank's piece is the unit
        kept = {*range(len(found))}
    placed = (p.device for p in model.parameters() if not p.is_meta)
    ledger = Ledger(ranks_of(comm, size, near), next(placed, comm.device), offload)
    units = _build(model, found, row, ledger, init)
    meta.fill(model, model.buffers(), init, comm.device)  # of modules without parameters
    broadcast(comm, model.buffers())
    ledger.peak = ledger.now.copy()
    engine = Engine(
        model,
        row,
        units,
        ledger,
        kept=kept,
        prefetch_bytes=prefetch_bytes if overlap else 0,
        overlap=overlap,
    )
    move_inputs(model, engine.device, engine.add_hook)
    cast_at(model, chosen, precisions, engine.computes, engine.add_hook)
    recorder.join(engine, EngineTracer)
    copies.mark(model)
    return engine


def _check(value: object, allowed: Any, name: str) -> None:
    if not isinstance(value, allowed):
        kinds = getattr(allowed, "__args__", (allowed,))
        names = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
        raise UsageError(f"shard({name}={value!r}): allowed: {names}")


def check_size(name: str, size: int, ranks: int) -> None:
    """Raise UsageError unless so many ranks are equal parts of `ranks`."""
    if type(size) is not int or size < 1 or ranks % size:
        fit = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise UsageError(f"{name} is {size!r}, over {ranks} ranks; allowed: {fit}")


def _build(
    model: nn.Module,
    found: Sequence[UnitSpec],
    stage: Stage,
    ledger: Ledger,
    init: meta.Init | None,
) -> list[FlatUnit]:
    named = [(f.name, [(n, p.numel()) for n, p in f.parameters]) for f in found]
    plans, at = layout(named, ledger.ranks.shards.size, ledger.ranks.replica_count), places(model)
    units: list[FlatUnit] = []
    for index in reversed(range(len(found))):  # the root last: it may own a part of every module
        spec, plan = found[index], plans[index]
        meta.fill(spec.module, [p for _, p in spec.parameters], init, ledger.ranks.every.device)
        for name, p in spec.parameters:
            resting.name(p, name)
            p.grad = None  # from stage 1 on it would have another shape than the parameter
        registered = [at[p] for _, p in spec.parameters]
        units.append(FlatUnit(index, plan, spec, registered, stage, ledger))
    return units[::-1]
