"""Widen, compute, round once: the dtype that arithmetic happens in, for a source and a target."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)


def wide_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """float32, or float64 where either side is float64.

    Raises ValueError for other dtypes, and for float64 to 16 bits: torch and the hardware do that
    in two roundings, through float32.
    """
    if source not in FLOATS or target not in FLOATS:
        raise ValueError(f"{source} to {target} is not supported; both must be in {FLOATS}")
    if source == torch.float64 and target in HALF:
        raise ValueError(f"{source} to {target} would round twice; go through torch.float32")
    return torch.float64 if torch.float64 in (source, target) else torch.float32
