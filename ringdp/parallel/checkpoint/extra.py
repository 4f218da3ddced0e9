"""Modules' extra state (torch's get_extra_state), if it consists of plain values and tensors.

It is written as `nested` packs it. Rank 0's is written, and every rank loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ringdp.errors import CheckpointError
from ringdp.parallel import nested


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with extra state, by name."""
    none = nn.Module.get_extra_state
    return {n: m for n, m in model.named_modules() if type(m).get_extra_state is not none}


def pack(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Every module's extra state as JSON, and its tensors by key. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    states = {}
    for name, module in modules(model).items():

        def put(t: Tensor, name: str = name) -> str:
            key = f"extra/{len(tensors)}/{name}"
            tensors[key] = t
            return key

        try:
            states[name] = nested.pack(module.get_extra_state(), put)
        except TypeError as e:
            raise CheckpointError(
                f"the extra state of module {name or 'the model'} has a {e}; allowed: "
                f"{nested.ALLOWED}"
            ) from e
    return states, tensors


def unpack(packed: Any, tensor: Callable[[Any], Any]) -> Any:
    """The state; `tensor(key)` gives its tensors. Raises CheckpointError if it is malformed."""
    try:
        return nested.unpack(packed, tensor)
    except ValueError as e:
        raise CheckpointError(f"a module's extra state is not sound: {e}") from e
