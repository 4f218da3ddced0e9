"""Many tensors into one flat bucket: copy, scale and cast in a single pass, and zero the padding.

    out[o_i : o_i + n_i] = round(wide(x_i) · scale)   for each tensor,   0 elsewhere

wide is float32, or float64 where either side is. The product is rounded to wide and then once to
out's dtype, to nearest even.
Must move n·(bytes of x + bytes of out), plus the padding's bytes of out. Leaves out: CUDA graph
capture (the chunk table is copied from the host), and tensors that overlap `out` other than by
being exactly the slice they go to. Reference: `flatten_torch`.
"""
# ruff: noqa: N803  a Triton constant is upper case

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .batches import batches
from .jit import jit, triton_dtype
from .precision import check_scale, scaled_copy, wide_dtype
from .spans import BLOCK, check, gaps, tables

if TYPE_CHECKING:
    import triton.language as tl


def flatten(
    tensors: Sequence[Tensor], out: Tensor, *, scale: float = 1.0, offsets: Sequence[int]
) -> None:
    """Copy each tensor times `scale` to `out` from its offset on (in elements); zero the rest.

    `out` is [elems], contiguous; the tensors may have any shape, strides and float dtype. Raises
    ValueError if they overlap in `out`, reach past its end, or have an unsupported dtype or device.
    """
    check(tensors, out, offsets, "out")
    for dtype in {x.dtype for x in tensors}:
        check_scale(scale, dtype, out.dtype)
    with torch.no_grad():
        (flatten_triton if out.is_cuda else flatten_torch)(tensors, out, scale, offsets)


def flatten_torch(
    tensors: Sequence[Tensor], out: Tensor, scale: float, offsets: Sequence[int]
) -> None:
    for first, last in gaps([x.numel() for x in tensors], offsets, len(out)):
        out[first:last].zero_()
    for offset, batch in batches(tensors, offsets):
        # Also where a tensor is its own slice of `out`, so the batch is copied first.
        x = batch[0] if len(batch) == 1 else torch.cat(batch)
        scaled_copy(x, out.narrow(0, offset, x.numel()).view(x.shape), scale)


@jit
def flatten_kernel(
    chunks: tl.tensor,  # int64[programs, 3], rows are Spans of at most BLOCK elements
    out: tl.tensor,
    scale: tl.float64,
    SOURCE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    chunk = chunks + tl.program_id(0).to(tl.int64) * 3
    address = tl.load(chunk)
    target = out + tl.load(chunk + 1)
    count = tl.load(chunk + 2)
    lane = tl.arange(0, BLOCK)
    factor = tl.cast(scale, WIDE)
    element = out.dtype.element_ty
    if address == 0:
        tl.store(target + lane, tl.full((BLOCK,), 0, element), mask=lane < count)
    else:
        source = address.to(tl.pointer_type(SOURCE))
        aligned = ((address | target.to(tl.int64)) & 15) == 0
        if (count == BLOCK) & aligned:  # 16-byte accesses: known alignment and no mask
            x = tl.load(tl.multiple_of(source, 16) + lane).to(WIDE)
            tl.store(tl.multiple_of(target, 16) + lane, (x * factor).to(element))
        else:
            x = tl.load(source + lane, mask=lane < count).to(WIDE)
            tl.store(target + lane, (x * factor).to(element), mask=lane < count)


def flatten_triton(
    tensors: Sequence[Tensor], out: Tensor, scale: float, offsets: Sequence[int]
) -> None:
    dense = [x.contiguous() for x in tensors]  # also keeps copies alive until the launch
    made = tables(dense, offsets, out.dtype, out.device, padded=len(out))
    for dtype, chunks in made.items():  # one launch, unless dtypes are mixed
        flatten_kernel[(len(chunks),)](
            chunks,
            out,
            scale,
            SOURCE=triton_dtype(dtype),
            WIDE=triton_dtype(wide_dtype(dtype, out.dtype)),
            BLOCK=BLOCK,
            num_warps=8,
        )
