"""The physical bound: the least time in which this machine can move the bytes that must move.

Every owner rewrites its buffer before a call, so the data that a rank needs from others lies in
their caches or in memory. The work of a collective's busiest rank on S bytes (`cases.Moves`) is
made of four passes:

    fold   add what another core has just written to this core's buffer, in place
    read   read what another core has just written
    pull   copy what another core has just written to one's own buffer
    copy   copy within one's own buffers

    bound = S · (folded · fold + read · read + pulled · pull + copied · copy)

The speeds are in s per byte: the fastest call of each pass in the same run, at the same S (at least
LEAST bytes), on two cores at once. If ranks share a core, that core does the work of all of
them, but finds in its cache what one rank has fetched: no pass then costs more than `copy`. In a
lap of `send` one rank works at a time, so there is nothing to add up.

The bound counts bytes only, as if a reader could reach a private buffer (the kernel can, by
cross-memory attach). It assumes that all ranks move bytes at once, with numpy's copies and sums. If
fewer do, as in a broadcast, or something is faster, a call can beat the bound; the table names such
calls. Passing a flag (about 0.1 µs), calls and Python are left out, so below about 16 KiB the bound
is far from what can be reached.
"""

from __future__ import annotations

from typing import NamedTuple

from ringdp.cli.bench.cases import Moves

LEAST = 256 << 10  # bytes: timing a shorter copy from Python measures the call


class Speeds(NamedTuple):
    """s per byte, in the order of the fields of `Moves`."""

    fold: float
    read: float
    pull: float
    copy: float


def bound(
    moves: Moves, n: int, cores: int, size: int, speeds: Speeds, *, lap: bool = False
) -> float:
    """The bound in seconds, for `size` bytes on n ranks, or for one message of a lap."""
    sharing = -(-n // cores)
    each = speeds if sharing == 1 else [min(speed, speeds.copy) for speed in speeds]
    one = size * sum(share * speed for share, speed in zip(moves, each, strict=True))
    return one if lap else sharing * one
