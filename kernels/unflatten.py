"""One flat bucket back into many tensors: copy, scale and cast in a single pass.

    x_i = round(wide(flat[o_i : o_i + n_i]) · scale)   for each tensor

`flatten` reversed, with its rounding: a bucket's sums go back to where the gradients came from.
Must move n·(bytes of flat + bytes of x). Leaves out: CUDA graph capture, and tensors that overlap
one another, or `flat` other than by being exactly their slice. Reference: `unflatten_torch`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import host
from .address import check_storage
from .copying import copy
from .precision import check_scale, scaled_copy
from .repeats import Repeats
from .spans import check

_repeats = Repeats()


def unflatten(
    flat: Tensor, tensors: Sequence[Tensor], *, scale: float = 1.0, offsets: Sequence[int]
) -> None:
    """Each tensor = its part of `flat`, from its offset on (in elements), times `scale`.

    `flat` is [elems], contiguous; the tensors may have any shape, strides and float dtype. Raises
    ValueError if their parts overlap, reach past its end, or a dtype or device is unsupported.
    """
    if flat.is_cuda:
        unflatten_triton(flat, tensors, scale, offsets)
    elif not host.unflatten(flat, tensors, offsets, scale, torch.get_num_threads()):
        check(tensors, flat, offsets, "flat")
        for dtype in {x.dtype for x in tensors}:
            check_scale(scale, flat.dtype, dtype)
        check_storage(flat, *tensors)
        dense = [x if x.is_contiguous() else empty(x) for x in tensors]
        if host.unflatten(flat, dense, offsets, scale, torch.get_num_threads()):
            _copy(dense, tensors)
        else:
            unflatten_torch(flat, tensors, scale, offsets)
    increment_version(tensors)


@torch.no_grad()
def unflatten_torch(
    flat: Tensor, tensors: Sequence[Tensor], scale: float, offsets: Sequence[int]
) -> None:
    for x, offset in zip(tensors, offsets, strict=True):
        scaled_copy(flat.narrow(0, offset, x.numel()).view(x.shape), x, scale)


def unflatten_triton(
    flat: Tensor, tensors: Sequence[Tensor], scale: float, offsets: Sequence[int]
) -> None:
    if copy(tensors, flat, scale, offsets, "flat", into_flat=False, repeats=_repeats):
        return
    dense = [empty(x) for x in tensors]
    unflatten_triton(flat, dense, scale, offsets)
    _copy(dense, tensors)


@torch.no_grad()
def _copy(dense: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for x, filled in zip(tensors, dense, strict=True):
        if x is not filled:
            x.copy_(filled)


def empty(like: Tensor) -> Tensor:
    """A contiguous tensor of the same shape."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)
