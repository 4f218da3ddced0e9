"""One flat bucket back into many tensors: copy, scale and cast in a single pass.

    x_i = round(wide(flat[o_i : o_i + n_i]) · scale)   for each tensor

`flatten` reversed, with its rounding: a bucket's sums go back to where the gradients came from.
Must move n·(bytes of flat + bytes of x). Leaves out: CUDA graph capture, and tensors that overlap
`flat` other than by being exactly their slice. Reference: `unflatten_torch`.
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
from .spans import BLOCK, check, tables

if TYPE_CHECKING:
    import triton.language as tl


def unflatten(
    flat: Tensor, tensors: Sequence[Tensor], *, scale: float = 1.0, offsets: Sequence[int]
) -> None:
    """Each tensor = its part of `flat`, from its offset on (in elements), times `scale`.

    `flat` is [elems], contiguous; the tensors may have any shape, strides and float dtype. Raises
    ValueError if their parts overlap, reach past its end, or a dtype or device is unsupported.
    """
    check(tensors, flat, offsets, "flat")
    for dtype in {x.dtype for x in tensors}:
        check_scale(scale, flat.dtype, dtype)
    with torch.no_grad():
        (unflatten_triton if flat.is_cuda else unflatten_torch)(flat, tensors, scale, offsets)


def unflatten_torch(
    flat: Tensor, tensors: Sequence[Tensor], scale: float, offsets: Sequence[int]
) -> None:
    for offset, batch in batches(tensors, offsets):
        if len(batch) == 1:
            part = flat.narrow(0, offset, batch[0].numel())
            scaled_copy(part.view(batch[0].shape), batch[0], scale)
            continue
        sizes = [x.numel() for x in batch]
        scaled = batch[0].new_empty(sum(sizes))
        scaled_copy(flat.narrow(0, offset, len(scaled)), scaled, scale)
        torch._foreach_copy_(batch, scaled.split_with_sizes(sizes))


@jit
def unflatten_kernel(
    chunks: tl.tensor,  # int64[programs, 3], rows are Spans of at most BLOCK elements
    flat: tl.tensor,
    scale: tl.float64,
    TARGET: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    chunk = chunks + tl.program_id(0).to(tl.int64) * 3
    address = tl.load(chunk)
    source = flat + tl.load(chunk + 1)
    count = tl.load(chunk + 2)
    lane = tl.arange(0, BLOCK)
    factor = tl.cast(scale, WIDE)
    target = address.to(tl.pointer_type(TARGET))
    aligned = ((address | source.to(tl.int64)) & 15) == 0
    if (count == BLOCK) & aligned:  # 16-byte accesses: known alignment and no mask
        x = tl.load(tl.multiple_of(source, 16) + lane).to(WIDE)
        tl.store(tl.multiple_of(target, 16) + lane, (x * factor).to(TARGET))
    else:
        x = tl.load(source + lane, mask=lane < count).to(WIDE)
        tl.store(target + lane, (x * factor).to(TARGET), mask=lane < count)


def unflatten_triton(
    flat: Tensor, tensors: Sequence[Tensor], scale: float, offsets: Sequence[int]
) -> None:
    dense = [x if x.is_contiguous() else torch.empty_like(x).contiguous() for x in tensors]
    for dtype, chunks in tables(dense, offsets, flat.dtype, flat.device).items():  # a launch each
        unflatten_kernel[(len(chunks),)](
            chunks,
            flat,
            scale,
            TARGET=triton_dtype(dtype),
            WIDE=triton_dtype(wide_dtype(flat.dtype, dtype)),
            BLOCK=BLOCK,
            num_warps=8,
        )
    for x, filled in zip(tensors, dense, strict=True):
        if x is not filled:
            x.copy_(filled)
