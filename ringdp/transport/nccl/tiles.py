"""The places of a plan as tensors, a tile at a time.

A schedule does the same to every element of a chunk. So it may run on a stretch of every chunk, a
tile, and then on the next: staging is as long as two tiles, whatever the buffer. Two tiles take
turns, the even and the odd one, each with staging of its own: while one is added, the other moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ringdp.transport.device.streams import PARITIES
from ringdp.transport.nccl.plan import Plan

ALIGNMENT = 16  # elements


class Tiles:
    """One rank's places. A tile has `slab` elements of every chunk, the last ones fewer."""

    def __init__(
        self, plan: Plan, buffer: Tensor, bounds: Sequence[int], staging: Tensor, slab: int
    ) -> None:
        """`bounds`: chunk c is [bounds[c], bounds[c+1]). `staging`: `staging_shape` elements.

        All ranks cut tiles alike: `slab` is the same on each.
        """
        self.plan = plan
        self._buffer, self._bounds, self._slab = buffer, bounds, slab
        self._staging = staging.view(staging_shape(plan, bounds, slab))
        self._at = buffer.data_ptr(), staging.data_ptr()
        self.count = -(-longest(bounds) // slab)

    def place(self, place: int, like: int, tile: int) -> Tensor:
        """As long as this tile of chunk `like`; 1-D, maybe empty."""
        if place < self.plan.chunks:
            begin, end = self._span(place, tile)
            return self._buffer[begin:end]
        begin, end = self._span(like, tile)
        return self._staging[tile % PARITIES, place - self.plan.chunks, : end - begin]

    def bytes_of(self, place: int, like: int, tile: int) -> tuple[int, int]:
        """Of `place(...)` the address, and how many: NCCL needs no tensor, which takes longer."""
        size, (buffer, staging) = self._buffer.element_size(), self._at
        if place < self.plan.chunks:
            begin, end = self._span(place, tile)
            return buffer + begin * size, (end - begin) * size
        begin, end = self._span(like, tile)
        _, rows, width = self._staging.shape
        row = tile % PARITIES * rows + place - self.plan.chunks
        return staging + row * width * size, (end - begin) * size

    def block(self, places: Sequence[int], like: int, tile: int) -> Tensor | None:
        """[len(places), elements] if they lie side by side in staging."""
        if not places or any(b - a != 1 for a, b in pairwise(places)):
            return None
        first = places[0] - self.plan.chunks
        begin, end = self._span(like, tile)
        return self._staging[tile % PARITIES, first : first + len(places), : end - begin]

    def _span(self, chunk: int, tile: int) -> tuple[int, int]:
        begin, end = self._bounds[chunk], self._bounds[chunk + 1]
        return min(begin + tile * self._slab, end), min(begin + (tile + 1) * self._slab, end)


def staging_shape(plan: Plan, bounds: Sequence[int], slab: int) -> tuple[int, int, int]:
    """[PARITIES, rows, elements of the longest place], padded so that rows are aligned."""
    return PARITIES, plan.rows, -(-min(slab, longest(bounds)) // ALIGNMENT) * ALIGNMENT


def longest(bounds: Sequence[int]) -> int:
    return max((end - begin for begin, end in pairwise(bounds)), default=0)
