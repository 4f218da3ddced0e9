"""A future of a list of tensors, as C++ reads it: those that Python makes hold objects of Python's.

DDP's Reducer reads both; torch's hook in C++ that compresses (FP16_COMPRESS) only such a list. It
reduces a tensor of its own, that nobody else looks at, where the Reducer's buckets have views.
TorchScript alone makes such a future, and not before the tensors are there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

ALONE = 2  # who look at the storage of one tensor: the tensor, and the Python object that we make


def is_of_hook(tensor: Tensor) -> bool:
    """Whether what `comes_from_autograd` is such a hook's tensor, and no bucket."""
    if tensor.layout is not torch.strided:
        return False
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= ALONE


def of(tensors: list[Tensor]) -> torch._C.Future[Any]:
    """Of tensors that are there already."""
    return torch.jit.fork(_same(), tensors)  # type: ignore[no-untyped-call,no-any-return]


@cache
def _same() -> Callable[[list[Tensor]], list[Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
        return torch.jit.script(_list)


def _list(tensors: list[Tensor]) -> list[Tensor]:
    return tensors
