"""The physical bound: the time in which the bytes that must move can move on this machine.

Every owner rewrites its buffer before a call, so what a rank needs of others lies in their caches,
or in memory. What the busiest rank of a collective must do there with S bytes (`cases.Moves`) are
shares of four passes:

    fold   add what another core has just written to what this one has, in place
    read   read what another core has just written
    pull   copy what another core has just written to a buffer of one's own
    copy   copy within one's own buffers

    bound = S · (folded · fold + read · read + pulled · pull + copied · copy)

in s per byte, each the fastest seen between the rounds of the same run, at the same S (at least
LEAST bytes), on two cores at once. Where ranks share a core, that core does the work of all, but
what one has fetched the next finds near: no pass is then priced above `copy`.

Counts bytes only, as if a reader could reach a private buffer (the kernel can, by cross-memory
attach). All ranks are taken to move at once, by numpy's copies and sums: where fewer do, as in a
broadcast, or something is faster, the best call is below the bound, and is named. Leaves out the
crossing of a flag (some 0.1 µs), calls, and Python: below some 16 KiB it is far from what can be
reached.
"""

from __future__ import annotations

from typing import NamedTuple

from ringdp.cli.bench.cases import Moves

LEAST = 256 << 10  # bytes: a shorter copy from Python measures the call


class Speeds(NamedTuple):
    """s per byte, in the order of `Moves`."""

    fold: float
    read: float
    pull: float
    copy: float


def bound(moves: Moves, n: int, cores: int, size: int, speeds: Speeds) -> float:
    """Seconds, for a buffer of `size` bytes on n ranks."""
    sharing = -(-n // cores)
    each = speeds if sharing == 1 else [min(speed, speeds.copy) for speed in speeds]
    return sharing * size * sum(share * speed for share, speed in zip(moves, each, strict=True))
