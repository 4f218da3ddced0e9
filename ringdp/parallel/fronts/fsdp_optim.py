"""The state_dict of a FullyShardedDataParallel's optimizer, by the names of its parameters."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from ringdp.errors import UsageError


def names_of(model: nn.Module, optim: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters it steps, by group. Raises UsageError for others."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [group["params"] for group in optim.param_groups]
    if any(id(p) not in names for group in groups for p in group):
        raise UsageError(
            f"the {type(optim).__name__} steps a parameter that the wrapped model has not; "
            "allowed: an optimizer made of its parameters after wrapping"
        )
    return [[names[id(p)] for p in group] for group in groups]


def by_name(names: list[list[str]], state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict, which may lack its groups, with names in place of numbers."""
    return _renamed(state, dict(enumerate(chain(*names))))


def by_number(names: list[list[str]], state: dict[str, Any]) -> dict[str, Any]:
    """What load_state_dict takes: it pairs the parameters of a group by their order, which here is
    that of `names`. Raises UsageError if a group has others."""
    here, there = [*map(set, names)], [set(group["params"]) for group in state["param_groups"]]
    if here != there or not state["state"].keys() <= {*chain(*names)}:
        others = sorted({*chain(*names)} ^ {*chain(*there, state["state"])})[:8]
        raise UsageError(
            f"optim_state_dict_to_load: the optim_state_dict has groups of {[*map(len, there)]} "
            f"parameters, the optimizer of {[*map(len, here)]}, and only one of them has "
            f"{', '.join(others) or 'some in that group'}; allowed: groups of the same parameters"
        )
    numbered = _renamed(state, {name: at for at, name in enumerate(chain(*names))})
    for group in numbered["param_groups"]:
        group["params"].sort()
        group.pop("param_names", None)  # in the saved order; the optimizer keeps its own
    return numbered


def _renamed(state: dict[str, Any], to: dict[Any, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {"state": {to[p]: s for p, s in state["state"].items()}}
    if "param_groups" in state:
        groups = state["param_groups"]
        renamed["param_groups"] = [g | {"params": [to[p] for p in g["params"]]} for g in groups]
    return renamed
