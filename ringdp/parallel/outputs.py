"""The tensors in what a module takes or returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

DEEP = 3  # objects within objects: one may hold all that a program has


def tensors(output: Any) -> Iterator[Tensor]:
    """Those in containers, dataclasses, containers of a class derived from dict, list or tuple, and
    attributes of other objects, as distributions are, and variables of functions, DEEP of these
    within one another; but for modules."""
    return _tensors(output, set(), DEEP)


def _tensors(value: Any, seen: set[int], deep: int) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif (parts := _parts(leaf)) and id(leaf) not in seen:
            held = isinstance(leaf, dict | list | tuple) or is_dataclass(leaf)
            if held or deep:
                seen.add(id(leaf))
                yield from _tensors(parts, seen, deep - (not held))


def _parts(x: Any) -> list[Any]:
    if isinstance(x, nn.Module | type | ModuleType):
        return []
    if isinstance(x, dict):
        return [*x.values()]
    if isinstance(x, list | tuple):
        return [*x]
    if is_dataclass(x):
        return [getattr(x, field.name) for field in fields(x)]
    slots = [names for c in type(x).__mro__ if (names := vars(c).get("__slots__"))]
    names = [name for s in slots for name in ([s] if isinstance(s, str) else s)]
    held = [getattr(x, name) for name in names if hasattr(x, name)]
    held += getattr(x, "__dict__", {}).values()
    if isinstance(x, FunctionType):
        held += [_contents(cell) for cell in x.__closure__ or ()]
    elif isinstance(x, partial):
        held += x.func, x.args, x.keywords
    return held


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return None


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with every tensor in containers and dataclasses replaced by the
    function's."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if isinstance(x, dict | list | tuple) and next(tensors(x), None) is not None:
            elements = x.values() if isinstance(x, dict) else x
            return _refilled(x, [map_tensors(function, y) for y in elements])
        if is_dataclass(x) and not isinstance(x, type):
            return replace(
                x,
                **{f.name: map_tensors(function, getattr(x, f.name)) for f in fields(x) if f.init},
            )
        return x

    return tree_map(leaf, value)


def _refilled(container: Any, elements: Iterable[Any]) -> Any:
    """Of the same class and attributes, with other elements."""
    if isinstance(container, tuple):
        made = tuple.__new__(type(container), elements)
        if attributes := getattr(container, "__dict__", None):
            vars(made).update(attributes)
        return made
    new = copy(container)
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key, element in zip(keys, elements, strict=True):
        new[key] = element
    return new


def lasting(output: Any, freed: Iterable[Tensor]) -> Any:
    """What a module may return in place of `output`, where what is in the memory of `freed` will be
    gone: that as a copy. And a leaf that is trained as a view, whose hooks go with the graph."""
    gone = {t.untyped_storage().data_ptr() for t in freed if t.untyped_storage().nbytes()}

    def dies(t: Tensor) -> bool:
        return (
            bool(gone)
            and t.layout is torch.strided
            and bool(t.numel())
            and t.untyped_storage().data_ptr() in gone
        )

    def is_leaf(t: Tensor) -> bool:
        return t.is_leaf and t.requires_grad and torch.is_grad_enabled()

    def one(t: Tensor) -> Tensor:
        if dies(t):
            return t.clone()
        return t.view_as(t) if is_leaf(t) else t

    if any(dies(t) or is_leaf(t) for t in tensors(output)):
        return map_tensors(one, output)
    return output
