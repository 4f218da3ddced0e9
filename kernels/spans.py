"""Where many tensors lie in one flat buffer, and the table that lets one launch serve them all.

A launch costs microseconds, so tensors are cut into chunks of at most BLOCK elements, one a
program, and a table says of each where it lies. The table is small: 24 bytes a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096  # elements per program


class Span(NamedTuple):
    """[offset, offset + elems) of a flat buffer belongs to `address` (bytes), 0 being padding."""

    address: int
    offset: int
    elems: int


def by_dtype(
    tensors: Sequence[Tensor], offsets: Sequence[int], default: torch.dtype
) -> dict[torch.dtype, list[Span]]:
    """The spans of contiguous tensors, for one launch a dtype; `default` where there is none."""
    spans: dict[torch.dtype, list[Span]] = {x.dtype: [] for x in tensors} or {default: []}
    for x, offset in zip(tensors, offsets, strict=True):
        if x.numel():
            spans[x.dtype].append(Span(x.data_ptr(), offset, x.numel()))
    return spans


def upload(spans: list[Span], itemsize: int, device: torch.device) -> Tensor:
    """Their chunk table on the device. `itemsize`: bytes of an element at an address."""
    table = chunk_table(tuple(spans), itemsize, device.type == "cuda")
    return table.to(device, non_blocking=True)


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


def gaps(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int]) -> list[tuple[int, int]]:
    """The parts (first, last) of `flat` that no tensor covers."""
    covered = sorted((o, o + x.numel()) for o, x in zip(offsets, tensors, strict=True) if x.numel())
    ends = [0, *(last for _, last in covered)]
    starts = [*(first for first, _ in covered), flat.numel()]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def check(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], name: str) -> None:
    """Raise ValueError unless each tensor has its place in `flat`, which the user calls `name`."""
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous, not {_describe(flat)}")
    if len(offsets) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors need as many offsets, not {len(offsets)}")
    for i, (x, offset) in enumerate(zip(tensors, offsets, strict=True)):
        if x.device != flat.device:
            raise ValueError(f"tensor {i} is on {x.device}, {name} on {flat.device}")
        if not 0 <= offset <= flat.numel() - x.numel():
            raise ValueError(
                f"tensor {i}, {_describe(x)}, at offset {offset} does not fit "
                f"in {flat.numel()} elements"
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
