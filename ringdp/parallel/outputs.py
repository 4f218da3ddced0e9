"""The tensors in what a module returned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors(output: Any) -> Iterator[Tensor]:
    """Those in containers and, as torch's DDP finds them, in dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors([getattr(leaf, field.name) for field in fields(leaf)])
