"""Finds and replaces the tensors in what a module takes or returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import Error, copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from operator import is_
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

DEEP = 3  # objects inside objects: one may reach everything in the program


def tensors(value: Any, deep: int = DEEP, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """The tensors in containers (subclasses of dict, list and tuple too), in dataclasses, and, up
    to `deep` levels of these, in other objects' attributes (such as distributions') and in
    functions' variables. Modules are not searched. `seen`: what has been, by id."""
    if isinstance(value, Tensor):
        yield value
        return
    seen = {} if seen is None else seen
    parts, is_object = _parts(value)
    if parts and id(value) not in seen and deep >= is_object:
        seen[id(value)] = value
        for part in parts:
            yield from tensors(part, deep - is_object, seen)


_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN = (int, float, str, type(None))  # for speed


def _parts(x: Any) -> tuple[list[Any], bool]:
    """What it holds, and whether it is an object other than a container or a dataclass."""
    if isinstance(x, _PLAIN):
        return [], False
    if isinstance(x, _CONTAINERS):
        return [*(x.values() if isinstance(x, dict) else x)], False
    parts, structure = tree_flatten(x, is_leaf=lambda inner: inner is not x)
    if not structure.is_leaf():  # another container that torch knows
        return parts, False
    held = [*_attributes(x).values()]
    if isinstance(x, FunctionType):
        held += [_contents(cell) for cell in x.__closure__ or ()]
    elif isinstance(x, partial):
        held += x.func, x.args, x.keywords
    return held, not is_dataclass(x)


def _attributes(x: Any) -> dict[str, Any]:
    if isinstance(x, nn.Module | type | ModuleType):
        return {}
    slots = [names for c in type(x).__mro__ if (names := vars(c).get("__slots__"))]
    names = [name for s in slots for name in ([s] if isinstance(s, str) else s)]
    return {n: getattr(x, n) for n in names if hasattr(x, n)} | getattr(x, "__dict__", {})


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def map_tensors(
    function: Callable[[Tensor], Tensor],
    value: Any,
    *,
    which: Callable[[Tensor], bool],
    deep: int = 0,
    made: dict[int, Any] | None = None,
) -> Any:
    """The same structure with `function(t)` in place of every tensor t for which `which(t)`.

    Parts without such tensors stay the same objects. Containers and dataclasses are copied; other
    objects too, up to `deep` levels. `made`: id -> copy, so that a container in two places is
    copied once.
    """
    made = {} if made is None else made

    def inner(x: Any, deep: int = deep) -> Any:
        return map_tensors(function, x, which=which, deep=deep, made=made)

    if isinstance(value, Tensor):
        return function(value) if which(value) else value
    if id(value) in made:
        return made[id(value)]
    parts, structure = tree_flatten(value, is_leaf=lambda x: x is not value)
    if not structure.is_leaf():
        mapped = [inner(x) for x in parts]
        same = all(map(is_, parts, mapped))
        made[id(value)] = value if same else tree_unflatten(mapped, structure)
        return made[id(value)]
    if not any(map(which, tensors(value))):
        return value
    if isinstance(value, _CONTAINERS):
        elements = value.values() if isinstance(value, dict) else value
        return _refilled(value, map(inner, elements))
    if not deep:
        return _made_again(value, inner) if is_dataclass(value) else value
    return _changed(value, lambda x: inner(x, deep - (not is_dataclass(value))))


def _refilled(container: Any, elements: Iterable[Any]) -> Any:
    """A container of the same class and attributes, with these elements."""
    if isinstance(container, tuple):
        made = tuple.__new__(type(container), elements)
        if attributes := getattr(container, "__dict__", None):
            vars(made).update(attributes)
        return made
    if isinstance(container, set | frozenset):
        return type(container)(elements)
    new = copy(container)
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key, element in zip(keys, elements, strict=True):
        new[key] = element
    return new


def _made_again(x: Any, change: Callable[[Any], Any]) -> Any:
    """The dataclass constructed from changed fields, as torch's DDP does."""
    return replace(x, **{f.name: change(getattr(x, f.name)) for f in fields(x) if f.init})


def _changed(x: Any, change: Callable[[Any], Any]) -> Any:
    """A copy with changed attributes; the object itself if it cannot be copied."""
    try:
        new = copy(x)
    except (TypeError, Error):
        return x
    for name, value in _attributes(x).items():
        object.__setattr__(new, name, change(value))  # also of a frozen class
    return new
