"""Sizes the FIFO channels between the ranks of one host."""

from __future__ import annotations

from typing import NamedTuple

from ringdp.transport.base import Link

IN_FLIGHT = 16  # slabs from one rank to all others, over a link
LEAST_DEPTH = 4  # slots


class FifoShape(NamedTuple):
    """The size of each FIFO between two ranks."""

    depth: int  # slots that a program may need
    stride: int  # slabs of a chunk in flight at once; multiplies the slots
    slab: int  # bytes of a slot

    @property
    def slots(self) -> int:
        return self.depth * self.stride


def fifo_shape(ranks: int, link: Link | None) -> FifoShape:
    """Return the shape of the FIFOs of so many ranks.

    Slabs are small enough that a message of some hundred KiB pipelines. Fused rings need 2 slots,
    halving more; 16 slots exceed a core's cache, for the reason in Note [room] in
    csrc/exchange.hpp: a ring of 2 ranks took 590 µs for 4 MiB with 4 slots and takes 290 with 16.
    """
    slab = max(4 << 10, min(64 << 10, (512 << 10) // ranks) & -64)
    if link:
        return FifoShape(LEAST_DEPTH, max(1, IN_FLIGHT // ranks), slab)
    return FifoShape(max(LEAST_DEPTH, 32 // ranks), 1, slab)
