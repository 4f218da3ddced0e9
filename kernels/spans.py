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


def tables(
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    default: torch.dtype,
    device: torch.device,
    *,
    padded: int = 0,
) -> dict[torch.dtype, Tensor]:
    """A chunk table for each dtype among contiguous tensors, on the device: one launch each.

    `padded`: elements of the flat buffer, for what no tensor covers of it to be chunks of the first
    table, or of one for `default`. To be read by kernels on the current stream only.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _tables(
        tuple(x.data_ptr() for x in tensors),
        tuple(x.numel() for x in tensors),
        tuple(x.dtype for x in tensors),
        tuple(offsets),
        default,
        padded,
        device,
        stream,
    )


# An allocator gives gradients the same addresses step after step. What is dropped here goes back to
# the allocator of the stream that its kernels are on.
@lru_cache(maxsize=64)
def _tables(
    addresses: tuple[int, ...],
    sizes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    offsets: tuple[int, ...],
    default: torch.dtype,
    padded: int,
    device: torch.device,
    stream: int,
) -> dict[torch.dtype, Tensor]:
    spans: dict[torch.dtype, list[Span]] = {d: [] for d in dtypes} or {default: []}
    for address, elems, dtype, offset in zip(addresses, sizes, dtypes, offsets, strict=True):
        if elems:
            spans[dtype].append(Span(address, offset, elems))
    if padded:
        padding = [Span(0, first, last - first) for first, last in gaps(sizes, offsets, padded)]
        next(iter(spans.values())).extend(padding)
    return {
        dtype: _upload(chunk_table(rows, dtype.itemsize), device)
        for dtype, rows in spans.items()
        if rows
    }


def _upload(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def chunk_table(spans: Sequence[Span], itemsize: int) -> Tensor:
    """Cut spans into chunks of at most BLOCK elements: int64[chunks, 3] on the host.

    `itemsize`: bytes of an element at an address.
    """
    table = torch.tensor(spans, dtype=torch.int64)
    pieces = (table[:, 2] + BLOCK - 1) // BLOCK
    skip = torch.arange(int(pieces.sum()))
    skip = (skip - (pieces.cumsum(0) - pieces).repeat_interleave(pieces)) * BLOCK
    table = table.repeat_interleave(pieces, 0)
    table[:, 0] += skip * itemsize * (table[:, 0] != 0)
    table[:, 1] += skip
    table[:, 2] = (table[:, 2] - skip).clamp(max=BLOCK)
    return table


def gaps(sizes: Sequence[int], offsets: Sequence[int], elems: int) -> list[tuple[int, int]]:
    """The parts (first, last) of [0, elems) that no tensor covers."""
    covered = sorted((o, o + size) for o, size in zip(offsets, sizes, strict=True) if size)
    ends = [0, *(last for _, last in covered)]
    starts = [*(first for first, _ in covered), elems]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def check(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], name: str) -> None:
    """Raise ValueError unless each tensor has its place in `flat`, which the user calls `name`."""
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous, not {_describe(flat)}")
    if len(offsets) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors need as many offsets, not {len(offsets)}")
    device = flat.device
    for i, x in enumerate(tensors):
        if x.device != device:
            raise ValueError(f"tensor {i} is on {x.device}, {name} on {device}")
    wrong = _wrong(tuple(x.numel() for x in tensors), tuple(offsets), flat.numel())
    if not wrong:
        return
    i, x = wrong[0], tensors[wrong[0]]
    if len(wrong) == 1:
        raise ValueError(
            f"tensor {i}, {_describe(x)}, at offset {offsets[i]} does not fit "
            f"in {flat.numel()} elements"
        )
    raise ValueError(
        f"tensor {i}, {_describe(x)}, at offset {offsets[i]} overlaps tensor {wrong[1]} at "
        f"{offsets[wrong[1]]}"
    )


@lru_cache(maxsize=64)  # steps ask for the same places
def _wrong(sizes: tuple[int, ...], offsets: tuple[int, ...], elems: int) -> tuple[int, ...]:
    """The first tensor that does not fit, or the first two that overlap."""
    for i, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        if not 0 <= offset <= elems - size:
            return (i,)
    order = sorted((o, i) for i, (o, size) in enumerate(zip(offsets, sizes, strict=True)) if size)
    for (a, i), (b, j) in pairwise(order):
        if a + sizes[i] > b:
            return i, j
    return ()


def _describe(x: Tensor) -> str:
    return f"{x.dtype}{list(x.shape)} with strides {x.stride()}"
