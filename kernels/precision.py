"""Widen, compute, round once: the dtype that arithmetic happens in, for a source and a target."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
ANY_SCALE = torch.finfo(torch.float32).max  # up to this, a scale is fine for all dtypes


@cache  # every launch asks
def wide_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """float32, or float64 where either side is float64.

    Raises ValueError for other dtypes, and for float64 to 16 bits, which torch and the hardware
    round twice, through float32.
    """
    if source not in FLOATS or target not in FLOATS:
        raise ValueError(f"{source} to {target} is not supported; both must be in {FLOATS}")
    if source == torch.float64 and target in HALF:
        raise ValueError(f"{source} to {target} would round twice; go through torch.float32")
    return torch.float64 if torch.float64 in (source, target) else torch.float32


def check_scale(scale: float, source: torch.dtype, target: torch.dtype) -> None:
    """Raise ValueError if the scale is not finite in the product's dtype; also as `wide_dtype`."""
    limit = _largest(source, target)
    if not abs(scale) <= limit:  # nor is a nan
        raise ValueError(f"scale must be finite and at most {limit:g}, not {scale}")


@cache
def _largest(source: torch.dtype, target: torch.dtype) -> float:
    return torch.finfo(wide_dtype(source, target)).max


def scaled_copy(source: Tensor, out: Tensor, scale: float) -> None:
    """out = round(wide(source) · scale) by torch, in as few passes as possible."""
    wide = wide_dtype(source.dtype, out.dtype)
    if scale == 1:
        out.copy_(source)
    elif source.dtype in (out.dtype, wide):  # torch multiplies 16-bit floats in float32 inside
        torch.mul(source, scale, out=out)
    elif out.dtype == wide:
        out.copy_(source).mul_(scale)
    else:
        torch.mul(source.to(wide), scale, out=out)
