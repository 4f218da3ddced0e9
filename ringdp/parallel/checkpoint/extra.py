"""Modules' extra state (torch's get_extra_state), if it consists of JSON values and tensors.

It is written as {"dict": {...}}, {"list": [...]}, {"tuple": [...]}, {"tensor": KEY} or
{"value": ...}, so that types are preserved. Nothing is pickled; other types are an error. Rank 0's
is written, and every rank loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ringdp.errors import CheckpointError


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with extra state, by name."""
    none = nn.Module.get_extra_state
    return {n: m for n, m in model.named_modules() if type(m).get_extra_state is not none}


def pack(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Every module's extra state as JSON, and its tensors by key. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    states = {n: _pack(m.get_extra_state(), n, tensors) for n, m in modules(model).items()}
    return states, tensors


def unpack(packed: Any, tensor: Callable[[str], Any]) -> Any:
    """The state; `tensor(key)` gives its tensors. Raises CheckpointError if it is malformed."""
    try:
        ((kind, value),) = packed.items()
        if kind == "tensor" and isinstance(value, str):
            return tensor(value)
        if kind == "dict":
            return {key: unpack(v, tensor) for key, v in value.items()}
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(unpack(v, tensor) for v in value)
        if kind == "value":
            return value
    except (AttributeError, TypeError, ValueError, RecursionError) as e:
        raise CheckpointError(f"a module's extra state is not sound: {e}") from e
    raise CheckpointError(f"a module's extra state is not sound: it has a {kind!r}")


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = f"extra/{len(tensors)}/{name}"
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _pack(v, name, tensors) for key, v in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(v, name, tensors) for v in value]}
    if isinstance(value, str | int | float | None):
        return {"value": value}
    raise CheckpointError(
        f"the extra state of module {name or 'the model'} has a {type(value).__name__}; allowed: "
        "tensors, numbers, strings, None, and dicts with strings for keys, lists and tuples of them"
    )
