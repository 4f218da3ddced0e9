"""Compares series of tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def equal(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    """Whether all values are equal. Raises ValueError if one series is longer."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
