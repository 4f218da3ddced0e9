"""Which parameters are gathered and freed together: modules become units.

A parameter belongs to the innermost unit around it. It belongs to the root, which is the model
itself and comes first, if several units share it (tied weights), if it lies in no unit, or if it is
smaller than `persist_below`. A unit has one flat buffer, whose parameters have the same dtypes and
are all trained or all frozen: a module with several such kinds becomes several units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import torch
from torch import jit, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ringdp.errors import UsageError
from ringdp.kernels.precision import FLOATS, wide_dtype
from ringdp.parallel.precision import (
    Dtypes,
    ModuleRule,
    Precisions,
    check_rule,
    dtypes,
    kept,
    matches,
    of_modules,
)

# These are never called, so their hooks would not run. MultiheadAttention has one of the last kind
# and reads its parameters: to a rule it is no Linear, and its parameters are the attention's.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_UNCALLED = (*_CONTAINERS, NonDynamicallyQuantizableLinear)

UnitRule = ModuleRule | int | set[nn.Module] | None


def lacks_forward(module: nn.Module) -> bool:
    """Whether it is a container that cannot be called."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


class UnitSpec(NamedTuple):
    """A unit: its name in the model ("" for the root), its module, its (name, parameter) pairs, and
    what these have in common."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]]
    dtypes: Dtypes
    trained: bool


def find_units(
    model: nn.Module,
    rule: UnitRule,
    *,
    persist_below: int = 0,
    precisions: Precisions | None = None,
) -> tuple[list[UnitSpec], set[nn.Module]]:
    """The root's units, then the others in order of registration; only the root may be empty. And
    the model and the modules chosen as units, even if the root has all of their parameters; without
    those that have none.

    `rule`: a module class, several, a predicate, or a number: the outermost modules of at most that
    many elements; or the set of modules, chosen by hand. Without a rule every entry of a ModuleList
    or Sequential is a unit, the outermost where they nest. Raises UsageError if there is no
    parameter, except with a set; unless all are floating-point, in memory of their own, and on one
    device (or on meta); for a module that takes no hooks, whose forward changes its weights, or
    that reduces gradients; or if gradients cannot be cast as `precisions` say.
    """
    if not isinstance(rule, set) and next(model.parameters(), None) is None:
        raise UsageError("the model has no parameter")
    _check_modules(model)
    _check_parameters(model)
    precision_of = of_modules(model, precisions or {})
    _, keeps = kept(precision_of)
    chosen = _chosen(model, rule) | {model}
    unit_at: dict[str, nn.Module] = {}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    of: dict[nn.Parameter, Dtypes] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # parents come first
        unit_at[name] = module if module in chosen else unit_at[name.rpartition(".")[0]]
        for p in module.parameters(recurse=False):
            owners.setdefault(p, set()).add(unit_at[name])
            here = dtypes(p.dtype, kept=module in keeps, precision=precision_of[module])
            if of.setdefault(p, here) != here:
                raise UsageError(
                    f"a parameter of {name or 'the model'} is tied to one that is to compute or be "
                    "reduced in another dtype; allowed: one precision for both of their modules, "
                    "of which keep_fp32 names both or none"
                )
    owned: dict[nn.Module, dict[tuple[Dtypes, bool], list[tuple[str, nn.Parameter]]]] = {model: {}}
    for name, p in model.named_parameters():
        (unit,) = owners[p] if len(owners[p]) == 1 else (model,)
        home = model if p.numel() < persist_below else unit
        owned.setdefault(home, {}).setdefault((of[p], p.requires_grad), []).append((name, p))
    if not owned[model]:
        owned[model][Dtypes(*3 * [torch.float32]), False] = []
    found = [
        UnitSpec(name, module, parameters, *kind)
        for name, module in model.named_modules()
        for kind, parameters in owned.get(module, {}).items()
    ]
    _check_casts(found)
    return found, {m for m in chosen if m is model or next(m.parameters(), None) is not None}


def _check_casts(units: Iterable[UnitSpec]) -> None:
    """Raise UsageError if a gradient cannot be cast from compute to reduce to master dtype, or, in
    no_sync, from compute to master to reduce."""
    for _, _, parameters, (master, compute, reduce), trained in units:
        try:
            for source, target in ((compute, reduce), (compute, master), (master, reduce)):
                if trained:
                    wide_dtype(source, target)
        except ValueError as e:
            raise UsageError(
                f"gradients of parameter {parameters[0][0]} are made in {compute}, "
                f"kept in {master} and reduced in {reduce}: {e}"
            ) from None


def _chosen(model: nn.Module, rule: UnitRule) -> set[nn.Module]:
    if isinstance(rule, set):
        if others := rule - {*model.modules()}:
            raise UsageError(f"unit={others!r}: allowed in a set: modules of the model")
        return _hooked(rule)
    if rule is None:
        return _outermost(model, lambda at, _: isinstance(at, nn.ModuleList | nn.Sequential))
    if isinstance(rule, int) and not isinstance(rule, bool):
        if rule < 1:
            raise UsageError(f"unit={rule}; as a number of elements it must be at least 1")
        return _outermost(model, lambda _, m: sum(p.numel() for p in m.parameters()) <= rule)
    check_rule("unit", rule, "a number of elements")
    return _matching(model, cast(ModuleRule, rule))


def _outermost(
    model: nn.Module, chooses: Callable[[nn.Module | None, nn.Module], bool]
) -> set[nn.Module]:
    """The modules for which `chooses(parent, module)`, without those inside another one."""
    chosen: set[nn.Module] = set()
    below: list[tuple[nn.Module | None, nn.Module]] = [(None, model)]
    while below:
        at, module = below.pop()
        if chooses(at, module) and not isinstance(module, _UNCALLED):
            chosen.add(module)
        else:
            below += [(module, child) for child in module.children()]
    return chosen


def _matching(model: nn.Module, rule: ModuleRule) -> set[nn.Module]:
    within = [m for m in model.modules() if m is not model]
    chosen = {m for m in within if matches(m, rule)}
    if not chosen:
        kinds = ", ".join(sorted({type(m).__name__ for m in within})) or "no modules"
        raise UsageError(f"unit={rule!r} matches no module within the model; it has {kinds}")
    return _hooked(chosen)


def _hooked(chosen: set[nn.Module]) -> set[nn.Module]:
    """Without those whose parameters another module uses. Raises UsageError for a container."""
    for m in chosen:
        if lacks_forward(m):
            raise UsageError(f"a {type(m).__name__} cannot be a unit: it has no forward")
    return {m for m in chosen if not isinstance(m, NonDynamicallyQuantizableLinear)}


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        what = f"module {name}" if name else "the model"
        if isinstance(module, jit.ScriptModule):
            raise UsageError(
                f"{what} is a torch.jit.ScriptModule, which takes no hooks; shard what it was made "
                "of"
            )
        reduces = isinstance(module, DistributedDataParallel)  # ringdp's, too
        if reduces and any(p.requires_grad for p in module.parameters()):
            raise UsageError(
                f"{what} is a DistributedDataParallel, which reduces gradients, too; shard a model "
                "that is not wrapped in it"
            )
        embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if embeds and module.max_norm is not None:
            raise UsageError(
                f"{what} has max_norm={module.max_norm}: its forward rescales the rows that are "
                "used, which differ by rank, so the ranks would diverge. Set it to None, and "
                "rescale rows after the optimizer's step, within full_parameters(write=True)"
            )


def _check_parameters(model: nn.Module) -> None:
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(t):
            raise UsageError(f"{name} has no shape yet; give its lazy module a batch first")
    placed = [(name, p.device) for name, p in model.named_parameters() if not p.is_meta]
    lies: dict[int, str] = {}  # address -> name
    for name, p in model.named_parameters():
        if p.dtype not in FLOATS:
            raise UsageError(
                f"parameter {name} is {p.dtype}; parameters must be floats of 16, 32 or 64 bits"
            )
        if not p.is_meta and p.device != placed[0][1]:
            raise UsageError(
                f"parameters must be on one device: {placed[0][0]} is on {placed[0][1]}, "
                f"{name} on {p.device}"
            )
        if p.data_ptr() and (other := lies.setdefault(p.data_ptr(), name)) != name:
            raise UsageError(
                f"{other} and {name} are two parameters in the same memory, which would be trained "
                "apart; tie them by making them one nn.Parameter"
            )
