"""A job: one rank's part of a launch, in the layout that csrc/cuda's kernels read.

The kernel interprets the rows itself. One block per channel waits for flags in its rank's own
window, moves 16 bytes per thread at a time, and writes to its peers' windows. So the host only
launches.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.schedule.program import NONE, REDUCE, Program, Row
from ringdp.transport.base import REDUCE_OPS, ReduceOp
from ringdp.transport.bounds import Bounds

LINE = 128  # bytes between words that different ranks write (csrc's kLine)
# A slab costs its leader the same number of memory accesses whatever its size, so slabs are large.
# Half as large they move 22 % less, twice as large 6 to 15 % more, for windows twice as large
# [measured: H200, 2 ranks, 64 MiB].
SLAB = 128 << 10
LEADER = 512  # bytes of shared memory that do not depend on the program (csrc's kLeader)
SHARED = 48 << 10  # bytes of shared memory that a block may use without opting in to more
WIDE = (torch.float16, torch.bfloat16)  # summed in float32
COUNTS = 3  # per channel and peer: messages sent, messages taken, bytes sent
LONGEST = 1 << 62  # ns, the longest timeout of a kernel


class Fault(IntEnum):
    """csrc's enum Fault."""

    NONE = 0
    TIMEOUT = 1
    MISMATCH = 2
    STOPPED = 3  # a peer failed first


class FailureWord(NamedTuple):
    """A rank's failure word (csrc's Channel::fail). `peer` is the rank at fault."""

    fault: Fault
    peer: int
    channel: int
    round: int


def stopped(rank: int) -> int:
    """The failure word with which a rank's host stops its own kernels."""
    return Fault.STOPPED | rank << 16


def decoded(word: int) -> FailureWord:
    """Decode a failure word, which is not 0."""
    fault, *where = (word >> shift & 0xFFFF for shift in (0, 16, 32, 48))
    return FailureWord(Fault(fault), *where)


class Shape(NamedTuple):
    """The shape of all windows: each block has `depth` slots of `slab` bytes per sending rank.

    A program must need no more slots (`schedule.fifo_depth`). `slab` is a multiple of LINE.
    """

    ranks: int
    channels: int
    depth: int
    slab: int

    @property
    def window(self) -> int:
        """Bytes of a rank's window (csrc/cuda/window.hpp)."""
        places = self.channels * self.ranks
        return LINE * (1 + 2 * places) + places * self.depth * (LINE + self.slab)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Shape of the int64 tensor in which a rank counts its messages."""
        return self.channels, self.ranks, COUNTS


class Job(NamedTuple):
    """One rank's part of a launch: csrc's struct Job, 8 bytes a field, with device addresses."""

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


def tables_of(program: Program, bounds: Bounds) -> Tensor:
    """What a job points to, as int64 on the host: the bounds, then the rows, 6 int32 each."""
    rows = torch.from_numpy(program.rows.copy()).flatten().view(torch.int64)
    return torch.cat([torch.tensor(bounds, device="cpu"), rows])


def job_of(
    program: Program,
    tables: Tensor,
    shape: Shape,
    op: ReduceOp,
    *,
    active: int,
    timeout: float,
    counts: Tensor,
    failure: Tensor,
    windows: Tensor,
    number: int = 0,
    buffer: int = 0,
    room: int = 0,
) -> Job:
    """A rank's job, with `timeout` in s and device tensors: the program's tables, the rank's counts
    and failure word, and the addresses of all windows."""
    return Job(
        program.rank,
        *shape,
        active=active,
        number=number,
        timeout=int(min(timeout * 1e9, LONGEST)),
        op=REDUCE_OPS.index(op),
        rows=tables.data_ptr() + 8 * (program.chunks + 1),
        length=len(program.rows),
        bounds=tables.data_ptr(),
        chunks=program.chunks,
        scratch=program.scratch,
        buffer=buffer,
        room=room,
        counts=counts.data_ptr(),
        failure=failure.data_ptr(),
        windows=windows.data_ptr(),
    )


def greeted(program: Program) -> Program:
    """The program, preceded by an empty message to the next rank in a ring.

    Once every rank has received one with the number of its own launch, all are in the same
    collective. The program's rows alone may not detect a mismatch: they may not connect the ranks
    that disagree, or each may wait for the other's first message.
    """
    behind, before = (program.rank + 1) % program.ranks, (program.rank - 1) % program.ranks
    if behind == program.rank:
        return program
    rows = Row(0, NONE, behind, NONE, NONE, 0), Row(0, before, NONE, NONE, NONE, 0)
    return program.with_rows([*rows, *program])


def room_bytes(program: Program, shape: Shape, active: int, dtype: torch.dtype) -> int:
    """Bytes of room for `active` channels. Each has a slab per scratch chunk; if 16-bit floats are
    added, also a float32 per element of a slab, for every chunk."""
    adds = dtype in WIDE and any(row.flags & REDUCE for row in program)
    sums = 2 * adds * (program.chunks + program.scratch)
    return active * shape.slab * (program.scratch + sums)


def shared_bytes(program: Program) -> int:
    """Bytes of shared memory that a block needs for the program (csrc's shared_bytes).

    Raises UsageError if they exceed `SHARED`.
    """
    chunks = 8 * (program.chunks + 1) + program.chunks + 9 * program.scratch
    needed = LEADER + (8 + 8 * COUNTS) * program.ranks + 25 * len(program.rows) + chunks
    if needed > SHARED:
        raise UsageError(f"the program needs {needed} bytes of shared memory, more than {SHARED}")
    return needed
