"""Where many tensors lie in one flat buffer, and the table that lets one launch serve them all.

A launch costs microseconds, so tensors are cut into chunks, one for each program or several, and a
table says where each chunk lies: 24 bytes a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .address import address


class Span(NamedTuple):
    """[offset, offset + elems) of a flat buffer belongs to `address` (bytes; 0 for padding)."""

    address: int
    offset: int
    elems: int


def tables(
    tensors: Sequence[Tensor],
    device: torch.device,
    offsets: Sequence[int] | None = None,
    *,
    block: Callable[[torch.dtype], int],
    elems: int = 0,
    padding: torch.dtype | None = None,
) -> dict[torch.dtype, Tensor]:
    """Return a chunk table for each dtype of contiguous tensors, on the device: one launch each.

    Chunks have at most `block(dtype)` elements.
    With `padding`, what no tensor covers of the flat buffer's `elems` becomes chunks of the first
    table, or of one for the dtype `padding`. Only kernels on the current stream may read the
    tables. Raises ValueError if a tensor is not in memory, and RuntimeError in the capture of a
    CUDA graph, in which the upload would not take place.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tables of addresses cannot be made in the capture of a CUDA graph")
    offsets = offsets or [0] * len(tensors)
    spans: dict[torch.dtype, list[Span]] = {x.dtype: [] for x in tensors}
    if padding is not None:
        first = spans.setdefault(next(iter(spans), padding), [])
        sizes = [x.numel() for x in tensors]
        first += [Span(0, begin, end - begin) for begin, end in gaps(sizes, offsets, elems)]
    for x, offset in zip(tensors, offsets, strict=True):
        if x.numel():
            spans[x.dtype].append(Span(address(x), offset, x.numel()))
    return {
        dtype: _upload(chunk_table(rows, dtype.itemsize, block(dtype)), device)
        for dtype, rows in spans.items()
    }


def _upload(table: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or not len(table):
        return table
    return table.pin_memory().to(device, non_blocking=True)


def chunk_table(spans: Sequence[Span], itemsize: int, block: int) -> Tensor:
    """Cut spans into chunks of at most `block` elements: int64[chunks, 3] on the host.

    `itemsize`: bytes of an element at an address.
    """
    table = torch.tensor(spans, dtype=torch.int64, device="cpu").view(-1, 3)
    pieces = (table[:, 2] + block - 1) // block
    skip = torch.arange(int(pieces.sum()), device="cpu")
    skip = (skip - (pieces.cumsum(0) - pieces).repeat_interleave(pieces)) * block
    table = table.repeat_interleave(pieces, 0)
    table[:, 0] += skip * itemsize * (table[:, 0] != 0)
    table[:, 1] += skip
    table[:, 2] = (table[:, 2] - skip).clamp(max=block)
    return table


def gaps(sizes: Sequence[int], offsets: Sequence[int], elems: int) -> list[tuple[int, int]]:
    """Return the parts (first, last) of [0, elems) that no tensor covers."""
    covered = sorted((o, o + size) for o, size in zip(offsets, sizes, strict=True) if size)
    ends = [0, *(last for _, last in covered)]
    starts = [*(first for first, _ in covered), elems]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def check(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], name: str) -> None:
    """Raise ValueError unless `flat`, which the user calls `name`, is 1-D and contiguous, and each
    tensor has its place in it."""
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"{name} must be 1-D and contiguous, not {flat.dtype}{list(flat.shape)} with strides "
            f"{flat.stride()}"
        )
    if len(offsets) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors need as many offsets, not {len(offsets)}")
    device = flat.device
    for i, x in enumerate(tensors):
        if x.device != device:
            raise ValueError(f"tensor {i} is on {x.device}, {name} on {device}")
    if problem := _misfit(tuple(x.numel() for x in tensors), tuple(offsets), flat.numel()):
        raise ValueError(problem)


@lru_cache(maxsize=64)  # steps ask for the same places
def _misfit(sizes: tuple[int, ...], offsets: tuple[int, ...], elems: int) -> str | None:
    """Describe the first tensor that does not fit, or the first two that overlap."""

    def tensor(i: int) -> str:
        return f"tensor {i} ({sizes[i]} elements at offset {offsets[i]})"

    for i, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        if not 0 <= offset <= elems - size:
            return f"{tensor(i)} does not fit in {elems} elements"
    order = sorted((o, i) for i, (o, size) in enumerate(zip(offsets, sizes, strict=True)) if size)
    for (a, i), (b, j) in pairwise(order):
        if a + sizes[i] > b:
            return f"{tensor(i)} overlaps {tensor(j)}"
    return None
