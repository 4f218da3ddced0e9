"""Average, unscale and cast a reduced gradient, and check that it is finite, in a single pass.

    out[e] = round(wide(x[e]) · scale)        found = 1 if any out[e] is inf or nan, else as before

scale is 1/(ranks · loss scale). wide is float32, or float64 where either side is; the product is
rounded to wide and then once to out's dtype, to nearest even. The check looks at `out`, which the
optimizer will read, so it also finds an overflow of the cast.
Must move elems·(bytes of x + bytes of out). Reference: `unscale_torch`.
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
from .precision import ANY_SCALE, check_scale, scaled_copy, wide_dtype
from .repeats import Repeats

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024  # elements per program: of 16 bits, one access a thread
_repeats = Repeats()


def unscale(x: Tensor, out: Tensor, found: Tensor, *, scale: float) -> None:
    """out = x times `scale`, both [elems] and contiguous; `out` may be `x`.

    `found`, float32[1] on the same device, becomes 1.0 if an element of `out` is not finite, and
    else keeps its value, so many buckets can share one and nothing waits for the device. Raises
    ValueError on an unsupported dtype, shape, layout or device.
    """
    if x.is_cuda:
        if not (abs(scale) <= ANY_SCALE and _repeats.again([x, out, found], None, (scale,))):
            _check(x, out, found, scale)
            _repeats.keep([x, out, found], None, unscale_triton(x, out, found, scale))
    elif not host.unscale(x, out, found, scale, torch.get_num_threads()):
        _check(x, out, found, scale)
        check_storage(x, out, found)
        unscale_torch(x, out, found, scale)
    increment_version([out, found])


def _check(x: Tensor, out: Tensor, found: Tensor, scale: float) -> None:
    if x.dim() != 1 or x.shape != out.shape or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(
            f"x and out must be contiguous and [elems], not {list(x.shape)} with strides "
            f"{x.stride()} and {list(out.shape)} with strides {out.stride()}"
        )
    if found.dtype != torch.float32 or found.shape != (1,):
        raise ValueError(f"found must be torch.float32[1], not {found.dtype}{list(found.shape)}")
    if not x.device == out.device == found.device:
        raise ValueError(f"x is on {x.device}, out on {out.device}, found on {found.device}")
    check_scale(scale, x.dtype, out.dtype)


@torch.no_grad()
def unscale_torch(x: Tensor, out: Tensor, found: Tensor, scale: float) -> None:
    scaled_copy(x, out, scale)
    found.masked_fill_(~out.isfinite().all(), 1)


@jit(capturable=True, num_warps=4, unspecialized=("scale",))
def unscale_kernel(
    x: tl.tensor,
    out: tl.tensor,
    found: tl.tensor,
    elems: tl.tensor,
    scale: tl.float64,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # elements of one thread: 16 bytes
) -> None:
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < elems
    value = tl.load(x + where, mask=inside, other=0).to(WIDE) * tl.cast(scale, WIDE)
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + where, rounded, mask=inside)
    # Per thread 0, or nan if one of its elements is not finite. All threads that write write 1.0.
    zeros = tl.sum(tl.reshape(rounded.to(WIDE) * 0, (BLOCK // LANES, LANES)), 1)
    tl.store(found + tl.full((BLOCK // LANES,), 0, tl.int32), 1.0, mask=zeros != 0)


def unscale_triton(x: Tensor, out: Tensor, found: Tensor, scale: float) -> list[Launch | None]:
    wide = wide_dtype(x.dtype, out.dtype)
    return [
        unscale_kernel.launch(
            -(-elems // BLOCK),
            source,
            target,
            found,
            elems,
            scale,
            WIDE=wide,
            BLOCK=BLOCK,
            LANES=16 // min(x.itemsize, out.itemsize),
        )
        for _, elems, (source, target) in sixteens(x, out)  # See Note [16-byte accesses]
    ]
