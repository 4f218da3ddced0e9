"""Which parameters are gathered and freed together: modules become units.

A parameter belongs to the innermost unit around it; one that several units share (tied weights),
or that lies in none, belongs to the root, which is the model itself and always comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ringdp.errors import UsageError

UnitRule = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]

# Never called, so their hooks never run.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Found(NamedTuple):
    """A unit's name in the model ("" for the root), its module and its (name, parameter) pairs."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]]


def find_units(model: nn.Module, rule: UnitRule | None) -> list[Found]:
    """Root first, then the others as registered, without those that own no parameter.

    `rule` is a module class, several, or a predicate. Without one every entry of a ModuleList or
    Sequential is a unit, the outermost one where they nest. Raises UsageError if nothing can be
    trained, or if the parameters are not all of one floating dtype on one device.
    """
    _check(model)
    chosen = _listed(model) if rule is None else _matching(model, rule)
    unit_at: dict[str, nn.Module] = {}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # parents come first
        own = module in chosen or module is model
        unit_at[name] = module if own else unit_at[name.rpartition(".")[0]]
        for p in module.parameters(recurse=False):
            owners.setdefault(p, set()).add(unit_at[name])
    found = {m: Found(name, m, []) for name, m in model.named_modules() if m in chosen}
    found = {model: Found("", model, [])} | found
    for name, p in model.named_parameters():
        (unit,) = owners[p] if len(owners[p]) == 1 else (model,)
        found[unit].parameters.append((name, p))
    return [f for f in found.values() if f.parameters or f.module is model]


def _listed(model: nn.Module) -> set[nn.Module]:
    chosen: set[nn.Module] = set()
    below: list[nn.Module] = [model]
    while below:
        parent = below.pop()
        listed = isinstance(parent, nn.ModuleList | nn.Sequential)
        for child in parent.children():
            if listed and not isinstance(child, _CONTAINERS):
                chosen.add(child)
            else:
                below.append(child)
    return chosen


def _matching(model: nn.Module, rule: UnitRule) -> set[nn.Module]:
    if isinstance(rule, type | tuple):
        chosen = {m for m in model.modules() if isinstance(m, rule) and m is not model}
    else:
        chosen = {m for m in model.modules() if m is not model and rule(m)}
    if not chosen:
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise UsageError(f"unit={rule!r} matches no module of the model; it has {', '.join(kinds)}")
    for m in chosen:
        if isinstance(m, _CONTAINERS):
            raise UsageError(f"a {type(m).__name__} cannot be a unit: it has no forward")
    return chosen


def _check(model: nn.Module) -> None:
    parameters = list(model.named_parameters())
    if not any(p.requires_grad for _, p in parameters):
        raise UsageError("the model has no trainable parameter")
    first_name, first = parameters[0]
    if not first.is_floating_point():
        raise UsageError(f"parameter {first_name} is {first.dtype}; parameters must be floats")
    for name, p in parameters:
        if (p.dtype, p.device) != (first.dtype, first.device):
            raise UsageError(
                f"parameters must share one dtype and device: {first_name} is {first.dtype} on "
                f"{first.device}, {name} is {p.dtype} on {p.device}"
            )


def like(model: nn.Module) -> torch.Tensor:
    """An empty tensor of the model's dtype and device."""
    return next(model.parameters()).detach().new_empty(0)
