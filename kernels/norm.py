"""The square of the norm of many tensors: what clipping by global norm needs of each rank.

    squared_norm = Σ_i Σ_e float64(x_i[e])²

A float32 has 24 bits, so its square is exact in float64, and none overflows: the only rounding is
that of the sum, at most (elements − 1)·2⁻⁵³ of it (Higham 2002, §4.2; all terms are positive). Its
last bits depend on how tensors are cut among ranks; those of a float32 norm made of it hardly ever
do. The order is fixed for given lengths, so a repetition has the same bits on the same machine.
The global norm is the root of the sum of all ranks' results.
Must move elements · bytes of x. Leaves out: other norms. Reference: `squared_norm_torch`.
"""
# ruff: noqa: N803  a Triton constant is upper case

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .batches import batches
from .jit import jit, triton_dtype
from .precision import FLOATS
from .spans import BLOCK, tables

if TYPE_CHECKING:
    import triton.language as tl

CACHED = 262144  # elements per torch call: fewer are slower, more leave the caches


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """float64[] on the tensors' device (the CPU if there are none); inf or nan where they hold one.

    They may have any shape, strides and float dtype. Raises ValueError on another dtype or where
    they are on several devices.
    """
    devices = {x.device for x in tensors} or {torch.device("cpu")}
    if len(devices) > 1:
        raise ValueError(f"tensors must be on one device, not on {sorted(map(str, devices))}")
    for i, x in enumerate(tensors):
        if x.dtype not in FLOATS:
            raise ValueError(f"tensor {i} is {x.dtype}; supported are {FLOATS}")
    with torch.no_grad():
        on_gpu = next(iter(devices)).type == "cuda"
        return (squared_norm_triton if on_gpu else squared_norm_torch)(tensors)


def squared_norm_torch(tensors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    places = [0, *accumulate(x.numel() for x in tensors)][:-1]
    wide = torch.empty(min(CACHED, sum(x.numel() for x in tensors)), dtype=torch.float64)
    for _, batch in batches(tensors, places):
        flat = batch[0].reshape(-1) if len(batch) == 1 else torch.cat(batch)
        for first in range(0, len(flat), CACHED):
            part = flat[first : first + CACHED]
            x = wide[: len(part)].copy_(part)
            total += torch.dot(x, x)
    return total


@jit
def squared_norm_kernel(
    chunks: tl.tensor,  # int64[programs, 3], rows are Spans of at most BLOCK elements
    partial: tl.tensor,  # float64[programs]
    SOURCE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    address = tl.load(chunks + program * 3)
    count = tl.load(chunks + program * 3 + 2)
    lane = tl.arange(0, BLOCK)
    source = address.to(tl.pointer_type(SOURCE))
    if (count == BLOCK) & ((address & 15) == 0):  # 16-byte accesses: known alignment and no mask
        x = tl.load(tl.multiple_of(source, 16) + lane).to(tl.float64)
        tl.store(partial + program, tl.sum(x * x, 0))
    else:
        x = tl.load(source + lane, mask=lane < count, other=0).to(tl.float64)
        tl.store(partial + program, tl.sum(x * x, 0))


def squared_norm_triton(tensors: Sequence[Tensor]) -> Tensor:
    dense = [x.contiguous() for x in tensors]
    device = dense[0].device if dense else torch.device("cpu")
    sums = []
    for dtype, chunks in tables(dense, [0] * len(dense), torch.float32, device).items():
        partial = torch.empty(len(chunks), dtype=torch.float64, device=device)
        squared_norm_kernel[(len(chunks),)](
            chunks, partial, SOURCE=triton_dtype(dtype), BLOCK=BLOCK, num_warps=8
        )
        sums.append(partial.sum())
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=device)
    return sum(sums[1:], sums[0])  # several only where dtypes are mixed
