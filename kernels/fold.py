"""Sum the ranks' parts in rank order, in one pass: the arithmetic of a reduce-scatter.

    out[e] = round(((wide(parts[0, e]) + wide(parts[1, e])) + wide(parts[2, e])) + ...)

wide is float32, or float64 where either side is; the sum is rounded to out's dtype once, to nearest
even. Integers are summed modulo 2^bits in their own dtype. The order is the same for every element,
so the bits depend on the parts only. The sum starts from part 0, not from zero, which keeps −0.0.
One part may lie apart from the others: this rank's own, while the others were received.
Must move n·elems·(bytes of parts) + elems·(bytes of out). Reference: `fold_torch`.

Note [order of additions]
    LLVM takes a chain of additions for a sum that it may treat as a whole: in Triton 3.8 it adds
    16-bit parts of unaligned rows in reverse order, and it adds two bfloat16 in float16 where the
    sum is stored as that. So a part is added by fma(part, one, total), which rounds once, as an
    addition does, and which LLVM leaves alone as it does not know that `one` is 1.
"""
# ruff: noqa: N803  a Triton constant is upper case

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ringdp._core import Launch

from . import host
from .address import check_storage
from .jit import jit, sixteens
from .precision import wide_dtype
from .repeats import Repeats

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024  # elements per program
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
# torch cannot add these on the CPU; modulo 2^bits the signed sum has the same bits.
SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
_repeats = Repeats()


def fold(parts: Tensor, out: Tensor, own: Tensor | None = None, at: int = 0) -> None:
    """out = the sum of `parts` [n, elems] over n in rank order; `out` is [elems].

    `own` [elems] is one more part, which comes after the first `at` rows of `parts`. There may be
    gaps between rows, but each row must be contiguous. `out` may be a row, or `own`. Raises
    ValueError on a wrong shape, dtype or device.
    """
    tensors = [parts, out] if own is None else [parts, own, out]
    if out.is_cuda:
        done = _repeats.again(tensors, [at], (1.0,))
    else:
        done = host.fold(parts, out, own, at, torch.get_num_threads())
    if not done:
        _checked(tensors, parts, out, own, at)
    increment_version(out)


def _checked(
    tensors: list[Tensor], parts: Tensor, out: Tensor, own: Tensor | None, at: int
) -> None:
    shape = parts.shape
    if len(shape) != 2 or shape[0] == 0 or (shape[1],) != out.shape:
        raise ValueError(
            f"parts must be [n, elems] with n > 0 and out [elems], "
            f"not {list(shape)} and {list(out.shape)}"
        )
    elems = shape[1]
    if elems == 0:
        return
    if elems > 1 and (parts.stride(1) != 1 or out.stride(0) != 1):
        raise ValueError(
            f"rows must be contiguous; strides are {parts.stride()} in parts, {out.stride()} in out"
        )
    if parts.device != out.device:
        raise ValueError(f"parts are on {parts.device}, out on {out.device}")
    if own is not None:
        _check_own(own, at, parts)
    source, target = parts.dtype, out.dtype
    if source == target and target in SIGNED:
        source = target = SIGNED[target]
        parts, out = parts.view(target), out.view(target)
        own = None if own is None else own.view(target)
    whole = source == target and target in INTEGERS
    wide = target if whole else wide_dtype(source, target)
    if out.is_cuda:
        _repeats.keep(tensors, [at], fold_triton(parts, out, wide, own, at))
    elif not host.fold(parts, out, own, at, torch.get_num_threads()):  # unsigned ones as signed
        check_storage(*tensors)
        fold_torch(parts, out, wide, own, at)


def _check_own(own: Tensor, at: int, parts: Tensor) -> None:
    asked = parts.shape[1:], parts.dtype, parts.device
    if (own.shape, own.dtype, own.device) != asked or not own.is_contiguous():
        raise ValueError(
            f"own must be as one of parts, {list(parts.shape[1:])} of {parts.dtype} on "
            f"{parts.device}, and contiguous, not {list(own.shape)} of {own.dtype} on {own.device}"
        )
    if not 0 <= at <= len(parts):
        raise ValueError(f"own cannot come after {at} of {len(parts)} parts")


@torch.no_grad()
def fold_torch(
    parts: Tensor, out: Tensor, wide: torch.dtype, own: Tensor | None = None, at: int = 0
) -> None:
    first, *rest = parts if own is None else (*parts[:at], own, *parts[at:])
    total = first.to(wide, copy=True)
    for part in rest:
        total += part
    out.copy_(total)


@jit(capturable=True, num_warps=4, unspecialized=("one",))
def fold_kernel(
    parts: tl.tensor,  # [.., elems], rows `stride` elements apart: of all ranks but AT
    own: tl.tensor,  # [elems], of that one; where AT is RANKS, there is none
    out: tl.tensor,
    elems: tl.tensor,
    stride: tl.tensor,
    one: tl.float32,  # 1.0; see Note [order of additions]
    RANKS: tl.constexpr,
    AT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < elems
    total = tl.load((own if AT == 0 else parts) + where, mask=inside).to(WIDE)
    apart, one = tl.cast(stride, tl.int64), tl.cast(one, WIDE)
    for row in tl.range(1, AT, loop_unroll_factor=4):
        part = tl.load(parts + row * apart + where, mask=inside).to(WIDE)
        total = total + part if WIDE.is_int() else tl.fma(part, one, total)
    if AT > 0 and AT < RANKS:
        part = tl.load(own + where, mask=inside).to(WIDE)
        total = total + part if WIDE.is_int() else tl.fma(part, one, total)
    for row in tl.range(AT, RANKS - 1, loop_unroll_factor=4):
        part = tl.load(parts + row * apart + where, mask=inside).to(WIDE)
        total = total + part if WIDE.is_int() else tl.fma(part, one, total)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


def fold_triton(
    parts: Tensor, out: Tensor, wide: torch.dtype, own: Tensor | None = None, at: int = 0
) -> list[Launch | None]:
    ranks, stride = len(parts), parts.stride(0)
    if own is None:
        own, at = parts, ranks
    else:
        ranks += 1
    constants = {"RANKS": ranks, "AT": at, "WIDE": wide, "BLOCK": BLOCK}
    return [
        fold_kernel.launch(-(-elems // BLOCK), x, mine, target, elems, stride, 1.0, **constants)
        for _, elems, (x, mine, target) in sixteens(parts, own, out)  # Note [16-byte accesses]
    ]
