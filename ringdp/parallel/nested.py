"""Lists, tuples and dicts of tensors and plain values, as JSON that names the tensors.

A value is {"dict": [[key, value], ...]}, {"list": [...]}, {"tuple": [...]}, {"tensor": KEY} or
{"value": ...}, so that types are preserved. Nothing is pickled; other types are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

ALLOWED = "tensors, numbers, strings, None, and lists, tuples and dicts of them"
_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    torch.Size: "tuple",
}  # not what is made of names


def pack(value: Any, put: Callable[[Tensor], Any]) -> Any:
    """The JSON; `put` takes a tensor and returns its key. Raises TypeError, with the name of the
    type, for others."""
    if isinstance(value, Tensor):
        return {"tensor": put(value)}
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str | int | float | None)]:
            raise TypeError(f"dict with a {type(odd[0]).__name__} for a key")
        return {"dict": [[key, pack(v, put)] for key, v in value.items()]}
    if kind := _SEQUENCES.get(type(value)):
        return {kind: [pack(v, put) for v in value]}
    if isinstance(value, str | int | float | None):
        return {"value": value}
    raise TypeError(type(value).__name__)


def unpack(packed: Any, get: Callable[[Any], Any]) -> Any:
    """The value; `get` returns the tensor of a key. Raises ValueError if it is malformed."""
    try:
        ((kind, value),) = packed.items()
        if kind == "tensor":
            return get(value)
        if kind == "dict":
            return {key: unpack(v, get) for key, v in value}
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(unpack(v, get) for v in value)
        if kind == "value":
            return value
    except (AttributeError, LookupError, TypeError, RecursionError) as e:
        raise ValueError(e) from e
    raise ValueError(f"it has a {kind!r}")


def flat(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state of one parameter, with packed JSON for all that is no tensor. The
    tensors in a list, tuple or dict NAME follow it as NAME[0], NAME[1], ...

    Raises TypeError, with the name and the type, for state that cannot be packed.
    """
    out: dict[Any, Any] = {}
    for name, value in state.items():
        if "[" in str(name):
            raise TypeError(f"{name!r} has a [ in its name")
        if isinstance(value, Tensor):
            out[name] = value
            continue
        leaves: dict[str, Tensor] = {}
        try:
            out[name] = pack(value, partial(_leaf, name, leaves))
        except TypeError as e:
            raise TypeError(f"{name!r} has a {e}") from e
        out |= leaves
    return out


def deep(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state that `flat` was given. Raises ValueError if it is malformed."""
    return {
        name: value if isinstance(value, Tensor) else unpack(value, state.__getitem__)
        for name, value in state.items()
        if "[" not in str(name)
    }


def _leaf(name: Any, leaves: dict[str, Tensor], value: Tensor) -> str:
    key = f"{name}[{len(leaves)}]"
    leaves[key] = value
    return key
