"""The places of a parameter in a model: the modules and names under which it is registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn


class Place(NamedTuple):
    module: nn.Module
    name: str
    plain: bool  # the module has nn.Module's own __setattr__


def places(model: nn.Module) -> dict[nn.Parameter, list[Place]]:
    """Every parameter's places; a tied one has several."""
    found: dict[nn.Parameter, list[Place]] = {}
    for module in model.modules():
        plain = type(module).__setattr__ is nn.Module.__setattr__
        for name, p in module._parameters.items():
            if p is not None:
                found.setdefault(p, []).append(Place(module, name, plain))
    return found


def put(at: Sequence[Sequence[Place]], parameters: Sequence[nn.Parameter]) -> None:
    """Register each parameter in its places."""
    for where, parameter in zip(at, parameters, strict=True):
        for module, name, plain in where:
            if plain:
                module._parameters[name] = parameter  # setattr takes ten times as long
            else:  # a recurrent layer also keeps a list of its weights
                setattr(module, name, parameter)
