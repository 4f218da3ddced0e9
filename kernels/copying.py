"""Copy, scale and cast between many tensors and their places in one flat buffer, in one launch.

`flatten` and `unflatten` use it on a GPU. It takes any number of tensors of one dtype; a table of
chunks says where each one lies.
"""
# ruff: noqa: N803  a Triton constant is upper case

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .jit import jit
from .precision import ANY_SCALE, check_scale, wide_dtype
from .repeats import Repeats
from .spans import check, tables

if TYPE_CHECKING:
    import triton.language as tl


WARPS = 4
# Bytes of a program's elements in the narrower dtype: two 16-byte accesses a thread. With one or
# four it takes up to 10 % or 4 % longer [measured: H200, 256 MiB].
CHUNK = 2 * 16 * 32 * WARPS


@jit(num_warps=WARPS, unspecialized=("scale",))
def copy_kernel(
    chunks: tl.tensor,  # int64[programs, 3], rows are Spans of at most BLOCK elements
    flat: tl.tensor,
    scale: tl.float64,
    APART: tl.constexpr,  # dtype of the tensors
    WIDE: tl.constexpr,
    INTO_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    chunk = chunks + tl.program_id(0).to(tl.int64) * 3
    address = tl.load(chunk)
    place = flat + tl.load(chunk + 1)
    count = tl.load(chunk + 2).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    factor = tl.cast(scale, WIDE)
    if INTO_FLAT:
        source, target = address.to(tl.pointer_type(APART)), place
    else:
        source, target = place, address.to(tl.pointer_type(APART))
    element = target.dtype.element_ty
    if address == 0:  # padding
        tl.store(target + lane, tl.full((BLOCK,), 0, element), mask=lane < count)
    elif ((address | place.to(tl.int64) | count) & 15) == 0:  # See Note [16-byte accesses]
        # The hints are about copies: about the values themselves they would hold in every branch.
        near = tl.multiple_of((source.to(tl.int64) & -16).to(source.dtype), 16)
        far = tl.multiple_of((target.to(tl.int64) & -16).to(target.dtype), 16)
        inside = lane < tl.multiple_of(count & -16, 16)
        x = tl.load(near + lane, mask=inside).to(WIDE)
        tl.store(far + lane, (x * factor).to(element), mask=inside)
    else:
        x = tl.load(source + lane, mask=lane < count).to(WIDE)
        tl.store(target + lane, (x * factor).to(element), mask=lane < count)


def copy(
    tensors: Sequence[Tensor],
    flat: Tensor,
    scale: float,
    offsets: Sequence[int],
    name: str,
    *,
    into_flat: bool,
    repeats: Repeats,
) -> bool:
    """Copy the tensors to their places in `flat` and zero the rest, or copy them back from there.

    Returns False, and copies nothing, unless all are contiguous. `name` is what the user calls
    `flat`. Raises ValueError as `check` and `check_scale` do, and RuntimeError in the capture of a
    CUDA graph.
    """
    every = [*tensors, flat]
    if abs(scale) <= ANY_SCALE and repeats.again(every, offsets, (scale,)):
        return True
    tensors, offsets = every[:-1], [*map(index, offsets)]  # of any class: it may make its tensors
    if not all(map(Tensor.is_contiguous, tensors)):  # repeated launches were checked at first
        return False
    check(tensors, flat, offsets, name)
    padding = flat.dtype if into_flat else None

    def block(dtype: torch.dtype) -> int:
        return CHUNK // min(dtype.itemsize, flat.itemsize)

    made = tables(tensors, flat.device, offsets, block=block, elems=flat.numel(), padding=padding)
    casts = {d: (d, flat.dtype) if into_flat else (flat.dtype, d) for d in made}
    for cast in casts.values():
        check_scale(scale, *cast)
    launches = [
        copy_kernel.launch(
            len(chunks),
            chunks,
            flat,
            scale,
            APART=dtype,
            WIDE=wide_dtype(*casts[dtype]),
            INTO_FLAT=into_flat,
            BLOCK=block(dtype),
        )
        for dtype, chunks in made.items()  # one, unless dtypes are mixed
        if len(chunks)
    ]
    repeats.keep(every, offsets, launches, list(made.values()))
    return True
