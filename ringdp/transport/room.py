"""How much room there is between the ranks of one host: slots, and the files that hold them."""

from __future__ import annotations

from ringdp import _core
from ringdp.transport.base import Link

STRIDE = 16  # slabs that are under way at once over a link between two ranks, in as many more slots
LEAST_DEPTH = 4  # slots


def slab_bytes(ranks: int) -> int:
    """A FIFO slot: enough of them for a pipeline in a message of some hundred KiB."""
    return max(4 << 10, min(64 << 10, (512 << 10) // ranks) & -64)


def fifo_depth(ranks: int, link: Link | None) -> int:
    """Slots. Fused rings need 2, halving more; with 16 they are more room than a cache keeps.

    See Note [room] in csrc/messages.hpp: with 4 slots a ring of 2 ranks took 590 us for 4 MiB, with
    16 it takes 290.
    """
    return LEAST_DEPTH if link else max(LEAST_DEPTH, 32 // ranks)


def link_stride(ranks: int, link: Link | None) -> int:
    return max(1, STRIDE // ranks) if link else 1


def segment_bytes(ranks: int, depth: int) -> int:
    return int(_core.segment_size(ranks, depth, slab_bytes(ranks)))


def mail_bytes(ranks: int, depth: int) -> int:
    return int(_core.mailbox_size(ranks, depth, slab_bytes(ranks)))
