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

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .jit import jit, triton_dtype
from .precision import wide_dtype

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096  # elements per program


class Span(NamedTuple):
    """out[offset : offset + elems] comes from `address` (bytes), or is padding if that is 0."""

    address: int
    offset: int
    elems: int


def flatten(
    tensors: Sequence[Tensor], out: Tensor, *, scale: float = 1.0, offsets: Sequence[int]
) -> None:
    """Copy each tensor times `scale` to `out` from its offset on (in elements); zero the rest.

    `out` is [elems], contiguous; the tensors may have any shape, strides and float dtype. Raises
    ValueError if they overlap in `out`, reach past its end, or have an unsupported dtype or device.
    """
    _check(tensors, out, scale, offsets)
    with torch.no_grad():
        (flatten_triton if out.is_cuda else flatten_torch)(tensors, out, scale, offsets)


def flatten_torch(
    tensors: Sequence[Tensor], out: Tensor, scale: float, offsets: Sequence[int]
) -> None:
    for first, last in _gaps(tensors, out, offsets):
        out[first:last].zero_()
    for x, offset in zip(tensors, offsets, strict=True):
        part = out.narrow(0, offset, x.numel()).view(x.shape)
        wide = wide_dtype(x.dtype, out.dtype)
        if scale == 1:
            part.copy_(x)
        elif x.dtype in (out.dtype, wide):  # torch multiplies 16-bit floats in float32 inside
            torch.mul(x, scale, out=part)
        elif out.dtype == wide:
            part.copy_(x).mul_(scale)
        else:
            torch.mul(x.to(wide), scale, out=part)


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
    spans: dict[torch.dtype, list[Span]] = {x.dtype: [] for x in dense} or {out.dtype: []}
    for x, offset in zip(dense, offsets, strict=True):
        if x.numel():
            spans[x.dtype].append(Span(x.data_ptr(), offset, x.numel()))
    padding = [Span(0, first, last - first) for first, last in _gaps(tensors, out, offsets)]
    next(iter(spans.values())).extend(padding)
    for dtype, rows in spans.items():  # one launch, unless dtypes are mixed
        if rows:
            chunks = chunk_table(tuple(rows), dtype.itemsize, out.is_cuda)
            flatten_kernel[(len(chunks),)](
                chunks.to(out.device, non_blocking=True),
                out,
                scale,
                SOURCE=triton_dtype(dtype),
                WIDE=triton_dtype(wide_dtype(dtype, out.dtype)),
                BLOCK=BLOCK,
                num_warps=8,
            )


@lru_cache(maxsize=64)  # an allocator gives gradients the same addresses step after step
def chunk_table(spans: tuple[Span, ...], itemsize: int, pinned: bool) -> Tensor:
    """Cut spans into chunks of at most BLOCK elements: int64[chunks, 3] on the host."""
    table = torch.tensor(spans, dtype=torch.int64)
    pieces = (table[:, 2] + BLOCK - 1) // BLOCK
    skip = torch.arange(int(pieces.sum()))
    skip = (skip - (pieces.cumsum(0) - pieces).repeat_interleave(pieces)) * BLOCK
    table = table.repeat_interleave(pieces, 0)
    table[:, 0] += skip * itemsize * (table[:, 0] != 0)
    table[:, 1] += skip
    table[:, 2] = (table[:, 2] - skip).clamp(max=BLOCK)
    return table.pin_memory() if pinned else table


def _gaps(tensors: Sequence[Tensor], out: Tensor, offsets: Sequence[int]) -> list[tuple[int, int]]:
    """The parts (first, last) of `out` that no tensor covers."""
    covered = sorted((o, o + x.numel()) for o, x in zip(offsets, tensors, strict=True) if x.numel())
    ends = [0, *(last for _, last in covered)]
    starts = [*(first for first, _ in covered), out.numel()]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def _check(tensors: Sequence[Tensor], out: Tensor, scale: float, offsets: Sequence[int]) -> None:
    if out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out must be 1-D and contiguous, not {_describe(out)}")
    if len(offsets) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors need as many offsets, not {len(offsets)}")
    for i, (x, offset) in enumerate(zip(tensors, offsets, strict=True)):
        limit = torch.finfo(wide_dtype(x.dtype, out.dtype)).max
        if not math.isfinite(scale) or abs(scale) > limit:
            raise ValueError(f"scale must be finite and at most {limit:g}, not {scale}")
        if x.device != out.device:
            raise ValueError(f"tensor {i} is on {x.device}, out on {out.device}")
        if not 0 <= offset <= out.numel() - x.numel():
            raise ValueError(
                f"tensor {i}, {_describe(x)}, at offset {offset} does not fit "
                f"in {out.numel()} elements"
            )
    order = sorted(
        (o, i) for i, (o, x) in enumerate(zip(offsets, tensors, strict=True)) if x.numel()
    )
    for (a, i), (b, j) in pairwise(order):
        if a + tensors[i].numel() > b:
            raise ValueError(
                f"tensor {i}, {_describe(tensors[i])}, at offset {a} overlaps tensor {j} at {b}"
            )


def _describe(x: Tensor) -> str:
    return f"{x.dtype}{list(x.shape)} with strides {x.stride()}"
