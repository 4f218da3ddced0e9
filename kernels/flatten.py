"""Many tensors into one flat bucket: copy, scale and cast in a single pass, and zero the padding.

    out[o_i : o_i + n_i] = round(wide(x_i) · scale)   for each tensor,   0 elsewhere

wide is float32, or float64 where either side is. The product is rounded to wide and then once to
out's dtype, to nearest even.
Must move n·(bytes of x + bytes of out), plus the padding's bytes of out. Leaves out: CUDA graph
capture (the chunk table is copied from the host), and tensors that overlap `out` other than by
being exactly the slice they go to. Reference: `flatten_torch`.
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
from .spans import check, gaps

_repeats = Repeats()


def flatten(
    tensors: Sequence[Tensor], out: Tensor, *, scale: float = 1.0, offsets: Sequence[int]
) -> None:
    """Copy each tensor times `scale` to `out` from its offset on (in elements); zero the rest.

    `out` is [elems], contiguous; the tensors may have any shape, strides and float dtype. Raises
    ValueError if they overlap in `out`, reach past its end, or have an unsupported dtype or device.
    """
    if out.is_cuda:
        flatten_triton(tensors, out, scale, offsets)
    elif not host.flatten(tensors, out, offsets, scale, torch.get_num_threads()):
        check(tensors, out, offsets, "out")
        for dtype in {x.dtype for x in tensors}:
            check_scale(scale, dtype, out.dtype)
        check_storage(out, *tensors)
        dense = [x.contiguous() for x in tensors]
        if not host.flatten(dense, out, offsets, scale, torch.get_num_threads()):
            flatten_torch(tensors, out, scale, offsets)
    increment_version(out)


@torch.no_grad()
def flatten_torch(
    tensors: Sequence[Tensor], out: Tensor, scale: float, offsets: Sequence[int]
) -> None:
    for first, last in gaps([x.numel() for x in tensors], offsets, len(out)):
        out[first:last].zero_()
    for x, offset in zip(tensors, offsets, strict=True):
        scaled_copy(x, out.narrow(0, offset, x.numel()).view(x.shape), scale)


def flatten_triton(
    tensors: Sequence[Tensor], out: Tensor, scale: float, offsets: Sequence[int]
) -> None:
    if not copy(tensors, out, scale, offsets, "out", into_flat=True, repeats=_repeats):
        flatten_triton([x.contiguous() for x in tensors], out, scale, offsets)
