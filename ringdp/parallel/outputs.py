"""The tensors in what a module takes or returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def tensors(output: Any) -> Iterator[Tensor]:
    """Those in containers and, as torch's DDP finds them, in dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors([getattr(leaf, field.name) for field in fields(leaf)])


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with every tensor that `tensors` finds replaced by the function's."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if is_dataclass(x) and not isinstance(x, type):
            return replace(
                x,
                **{f.name: map_tensors(function, getattr(x, f.name)) for f in fields(x) if f.init},
            )
        return x

    return tree_map(leaf, value)
