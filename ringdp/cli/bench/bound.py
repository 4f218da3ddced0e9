"""The physical bound: the time in which the bytes that must move can move on this machine.

Every owner rewrites its buffer before a call, so what a rank needs of others lies in their caches,
or in memory. The busiest rank fetches `fetched` · S such bytes and writes `written` · S (`Moves`):

    bound = S · (min(fetched, written) · pull + max(0, fetched - written) · read + copied · copy)

    pull   s/byte to copy what another core has just written
    read   s/byte to read it only
    copy   s/byte to copy within a core's own buffers

each the fastest seen between the rounds of the same run, at the same S (at least LEAST bytes), two
cores at once. Where ranks share a core, that core does all of their work, but what one has fetched
the next finds near: every byte then costs the cheaper of pull and copy.

Counts bytes only, as if a reader could reach a private buffer (the kernel can, by cross-memory
attach). Leaves out the crossing of a flag (some 0.1 µs), calls, and Python: below some 16 KiB it is
far from what can be reached.
"""

from __future__ import annotations

from typing import NamedTuple

from ringdp.cli.bench.cases import Moves

LEAST = 256 << 10  # bytes: a shorter copy from Python measures the call


class Speeds(NamedTuple):
    """s per byte."""

    pull: float
    read: float
    copy: float


def bound(moves: Moves, n: int, cores: int, size: int, speeds: Speeds) -> float:
    """Seconds, for a buffer of `size` bytes on n ranks."""
    sharing = -(-n // cores)
    near = min(speeds.pull, speeds.copy)
    pull, read = (speeds.pull, speeds.read) if sharing == 1 else (near, min(speeds.read, near))
    both = min(moves.fetched, moves.written)
    per_byte = both * pull + (moves.fetched - both) * read + moves.copied * speeds.copy
    return sharing * size * per_byte
