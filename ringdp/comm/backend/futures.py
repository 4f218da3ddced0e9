"""Futures whose value is a C++ list of tensors; those made in Python hold a Python object.

DDP's Reducer reads both, but torch's C++ compression hook (FP16_COMPRESS) reads only a C++ list.
The hook reduces a temporary tensor of its own, which nothing else refers to; the Reducer's buckets
have views. Only TorchScript can make such a future, and only once the tensors are there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

ALONE = 2  # references to the storage of a single tensor: the tensor's, and our Python object's


def is_of_hook(tensor: Tensor) -> bool:
    """Return whether a tensor that `comes_from_autograd` is from such a hook, not a bucket."""
    if tensor.layout is not torch.strided:
        return False
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= ALONE


def of(tensors: list[Tensor]) -> torch._C.Future[Any]:
    """Return a completed future of tensors that are there already."""
    return torch.jit.fork(_same(), tensors)  # type: ignore[no-untyped-call,no-any-return]


@cache
def _same() -> Callable[[list[Tensor]], list[Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated
        return torch.jit.script(_list)


def _list(tensors: list[Tensor]) -> list[Tensor]:
    return tensors
