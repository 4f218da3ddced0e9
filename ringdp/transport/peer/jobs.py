"""What a rank's part of a launch is, in the form that csrc/cuda's kernels read it.

A kernel interprets the rows itself: a block for every channel waits for flags in its rank's own
window, moves data by 16 bytes a thread, and writes to the windows of its peers. So a launch is all
that the host does.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.schedule.program import NONE, REDUCE, Program, Row

LINE = 128  # bytes between what different ranks write (csrc's kLine)
# A slab costs its leader the same trips to memory whatever its size, so slabs are large: the
# largest power of two of which one for every block of a launch, written and soon read, fits the
# second-level cache. That is by data sheet 40 MB for 2 · 108 blocks on an A100, 50 MB for 2 · 132
# on an H100.
SLAB = 128 << 10
LEADER = 512  # bytes of shared memory that do not depend on the program (csrc's kLeader)
SHARED = 48 << 10  # bytes of shared memory that a block may have without asking
WIDE = (torch.float16, torch.bfloat16)  # summed in float32
COUNTS = 3  # of a channel to a peer: messages sent, taken, bytes sent
LONGEST = 1 << 62  # ns that a kernel waits, where nobody says how long


class Fault(IntEnum):
    """csrc's enum Fault."""

    NONE = 0
    TIMEOUT = 1
    MISMATCH = 2
    STOPPED = 3  # a peer failed first


class Failed(NamedTuple):
    """What a rank's failure word says (csrc's Channel::fail). `peer`: who is at fault."""

    fault: Fault
    peer: int
    channel: int
    round: int


def failed(word: int) -> Failed:
    """`word` is not 0."""
    fault, *where = (word >> shift & 0xFFFF for shift in (0, 16, 32, 48))
    return Failed(Fault(fault), *where)


class Shape(NamedTuple):
    """Of all windows: every block has `depth` slots of `slab` bytes for what each other rank sends
    it. A program must need no more slots (`schedule.fifo_depth`)."""

    ranks: int
    channels: int
    depth: int
    slab: int

    def check(self) -> None:
        """Raise UsageError for what cannot be."""
        if min(self.ranks, self.channels, self.depth) < 1 or self.slab < LINE or self.slab % LINE:
            raise UsageError(
                f"ranks, channels and depth are at least 1 and slab a multiple of {LINE} bytes, "
                f"not {self.ranks}, {self.channels}, {self.depth} and {self.slab}"
            )

    @property
    def window(self) -> int:
        """Bytes of a rank's window (csrc/cuda/window.hpp)."""
        places = self.channels * self.ranks
        return LINE * (1 + 2 * places) + places * self.depth * (LINE + self.slab)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Of int64, for a rank to count its messages."""
        return self.channels, self.ranks, COUNTS


class Job(NamedTuple):
    """One rank's part of a launch: csrc's struct Job, 8 bytes a field. Addresses are on the GPU."""

    rank: int
    ranks: int
    channels: int
    depth: int
    slab: int  # bytes
    active: int  # channels of this launch
    number: int
    timeout: int  # ns
    op: int
    rows: int
    length: int  # rows
    bounds: int
    chunks: int
    scratch: int
    buffer: int
    room: int
    counts: int
    failure: int
    windows: int


def kernel_name(dtype: torch.dtype) -> str:
    return "rows_" + str(dtype).removeprefix("torch.")


def rows_of(program: Program) -> Tensor:
    return torch.from_numpy(program.rows.copy())


def greeted(program: Program) -> Program:
    """With a message ahead that holds nothing, to the next rank of a circle.

    Where all have got theirs, and its number is that of their launch, all ranks are in the same
    collective: rows alone may not join those that are not, or let each wait for the other's first.
    """
    behind, before = (program.rank + 1) % program.ranks, (program.rank - 1) % program.ranks
    if behind == program.rank:
        return program
    rows = Row(0, NONE, behind, NONE, NONE, 0), Row(0, before, NONE, NONE, NONE, 0)
    return program.with_rows([*rows, *program])


def room_bytes(program: Program, shape: Shape, active: int, dtype: torch.dtype) -> int:
    """A channel's: a slab for each scratch chunk, and a float32 for each 16-bit element of a slab,
    for each chunk, where such are added."""
    adds = dtype in WIDE and any(row.flags & REDUCE for row in program)
    sums = 2 * adds * (program.chunks + program.scratch)
    return active * shape.slab * (program.scratch + sums)


def shared_bytes(programs: Sequence[Program]) -> int:
    """Of a block's shared memory, for any of them (csrc's shared_bytes).

    Raises UsageError for more than there is.
    """
    needed = max(
        LEADER
        + (8 + 8 * COUNTS) * p.ranks
        + 8 * (p.chunks + 1)
        + 25 * len(p.rows)
        + 9 * p.scratch
        + p.chunks
        for p in programs
    )
    if needed > SHARED:
        raise UsageError(f"the programs need {needed} bytes of shared memory, more than {SHARED}")
    return needed
