"""Maps the places of a plan to tensors, one tile at a time.

A schedule treats every element of a chunk alike. So it can run on one stretch of every chunk, a
tile, and then on the next: staging is as long as two tiles, whatever the buffer. Even and odd tiles
alternate, each with its own staging, so that folds of one overlap with transfers of the other.

Note [how long a tile is]
    As long as staging allows. A tile of T bytes over all chunks costs its g groups, and hides at
    most its folds, which move f T bytes. So a second tile pays if f T / H > g L. A group takes
    L = 10 µs (reported launch times are 3 to 10 µs, and sends must meet their receivers). Folds run
    at H = 2.5 TB/s, three quarters of an H100's memory bandwidth. On 8 ranks that gives T > 45 MB
    for direct (f = 1 + 1/n, g = 2) and 130 MB for a ring (f = 3 (n - 1) / n, g = 2 (n - 1)).

    Two tiles with k chunks in staging take 2 k T / n bytes. So with 128 MiB, direct has T = 73 MiB,
    which NVLink (370 GB/s) moves in 360 µs against 20 µs of launches, and a ring has 512 MiB. A
    plan that stages nothing has one tile. Of L and the rates only H is measured here: 4.4 TB/s on
    an H200, where T is 1.8 times as large, and direct's second tile no longer pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ringdp.schedule.program import Program
from ringdp.transport.device.streams import PARITIES
from ringdp.transport.nccl.plan import Plan

ALIGNMENT = 16  # elements


class Tiles:
    """One rank's places. A tile has `slab` elements of every chunk, at a chunk's end fewer."""

    def __init__(
        self, plan: Plan, buffer: Tensor, bounds: Sequence[int], staging: Tensor, slab: int
    ) -> None:
        """`bounds`: chunk c is [bounds[c], bounds[c+1]). `staging`: `staging_shape` elements.
        `slab` must be the same on all ranks, so that they cut tiles alike.
        """
        self.plan = plan
        self._buffer, self._bounds, self._slab = buffer, bounds, slab
        self._staging = staging.view(staging_shape(plan, bounds, slab))
        self._at = buffer.data_ptr(), staging.data_ptr()
        self.count = -(-longest(bounds) // slab)

    def place(self, place: int, like: int, tile: int) -> Tensor:
        """The 1-D tensor of a place, as long as this tile of chunk `like`; it may be empty."""
        if place < self.plan.chunks:
            begin, end = self._span(place, tile)
            return self._buffer[begin:end]
        begin, end = self._span(like, tile)
        return self._staging[tile % PARITIES, place - self.plan.chunks, : end - begin]

    def bytes_of(self, place: int, like: int, tile: int) -> tuple[int, int]:
        """Address and size in bytes of `place(...)`, without the cost of making a tensor."""
        size, (buffer, staging) = self._buffer.element_size(), self._at
        if place < self.plan.chunks:
            begin, end = self._span(place, tile)
            return buffer + begin * size, (end - begin) * size
        begin, end = self._span(like, tile)
        _, rows, width = self._staging.shape
        row = tile % PARITIES * rows + place - self.plan.chunks
        return staging + row * width * size, (end - begin) * size

    def block(self, places: Sequence[int], like: int, tile: int) -> Tensor | None:
        """The places as one tensor [len(places), elements], or None unless they are adjacent rows
        of staging."""
        if not places or any(b - a != 1 for a, b in pairwise(places)):
            return None
        first = places[0] - self.plan.chunks
        begin, end = self._span(like, tile)
        return self._staging[tile % PARITIES, first : first + len(places), : end - begin]

    def _span(self, chunk: int, tile: int) -> tuple[int, int]:
        begin, end = self._bounds[chunk], self._bounds[chunk + 1]
        return min(begin + tile * self._slab, end), min(begin + (tile + 1) * self._slab, end)


def slab_of(program: Program, bounds: Sequence[int], room: int) -> int:
    """Elements of every chunk in a tile, the same on all ranks: see Note [how long a tile is].

    `room`: total elements of staging.
    """
    if not program.staged:
        return max(longest(bounds), 1)
    return room // (PARITIES * program.staged * ALIGNMENT) * ALIGNMENT


def staging_shape(plan: Plan, bounds: Sequence[int], slab: int) -> tuple[int, int, int]:
    """[parities, rows, elements of the longest place], padded so that rows are aligned."""
    parities = PARITIES if longest(bounds) > slab else 1
    return parities, plan.rows, -(-min(slab, longest(bounds)) // ALIGNMENT) * ALIGNMENT


def longest(bounds: Sequence[int]) -> int:
    return max((end - begin for begin, end in pairwise(bounds)), default=0)
