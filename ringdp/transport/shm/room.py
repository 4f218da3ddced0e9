"""How much room there is between the ranks of one host."""

from __future__ import annotations

from typing import NamedTuple

from ringdp.transport.base import Link

UNDER_WAY = 16  # slabs over a link, of a rank to all others
LEAST_DEPTH = 4  # slots


class Room(NamedTuple):
    """Of a FIFO between two ranks."""

    depth: int  # slots that a program may need
    stride: int  # slabs of a chunk that are under way at once, in as many more slots
    slab: int  # bytes of a slot

    @property
    def slots(self) -> int:
        return self.depth * self.stride


def room_for(ranks: int, link: Link | None) -> Room:
    """A slab is small enough for a pipeline in a message of some hundred KiB. Fused rings need 2
    slots, halving more; with 16 they are more room than a cache keeps.

    See Note [room] in csrc/exchange.hpp: with 4 slots a ring of 2 ranks took 590 us for 4 MiB, with
    16 it takes 290.
    """
    slab = max(4 << 10, min(64 << 10, (512 << 10) // ranks) & -64)
    if link:
        return Room(LEAST_DEPTH, max(1, UNDER_WAY // ranks), slab)
    return Room(max(LEAST_DEPTH, 32 // ranks), 1, slab)
