"""What a unit's modules leave in their attributes: the auxiliary losses of mixtures of experts.

Their backward uses the unit's weights, before or after that of what the unit returns; so stage 3,
which frees them, hangs the same hooks there. Found are tensors with a history, and those in lists,
tuples and dicts whose names do not start with "_"; what is kept elsewhere is not.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class Left:
    """Of the modules of one unit, without those of `others`."""

    def __init__(self, module: nn.Module, others: Container[nn.Module]) -> None:
        self._modules = list(_own(module, others))
        self._known: Any = WeakIdKeyDictionary()

    def new(self) -> list[Tensor]:
        """What was not there when it was asked last."""
        if not torch.is_grad_enabled():
            return []
        found = [t for m in self._modules for t in _tensors(m) if t not in self._known]
        for t in found:
            self._known[t] = None
        return found


def _own(module: nn.Module, others: Container[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in others:
            yield from _own(child, others)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                yield value
        elif type(value) in (list, tuple, dict) and name[0] != "_":
            for inner in value.values() if isinstance(value, dict) else value:
                if isinstance(inner, Tensor) and inner.grad_fn is not None:
                    yield inner
