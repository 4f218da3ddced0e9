"""All ranks simulated in one process: the bit-exact oracle of every other transport.

It runs the programs' rows in order over FIFO channels of bounded depth, taking turns rank by rank,
one row at a time. The program fixes the order of additions, so a transport that accumulates in the
same dtype gives the same bits, and tests compare with `==`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from torch import Tensor

from ringdp.errors import ScheduleError, UsageError
from ringdp.schedule.program import NONE, Program, Row
from ringdp.transport.base import ReduceOp
from ringdp.transport.bounds import chunk_bounds
from ringdp.transport.rows import Rows


def simulate(
    programs: Sequence[Program],
    buffers: Sequence[Tensor],
    op: ReduceOp = "sum",
    *,
    depth: int = 2,
    bounds: Sequence[Sequence[int]] | None = None,
) -> None:
    """Run one program per rank on one flat buffer per rank, in place.

    `bounds` are each rank's chunk bounds, by default those of `chunk_bounds`. Raises UsageError if
    a rank's program or buffer is missing, or if buffers differ in length and no bounds are given.
    Raises ScheduleError, naming each rank's row, if the programs stall at this FIFO depth.
    """
    n = programs[0].ranks if programs else 0
    if not len(programs) == len(buffers) == n:
        raise UsageError(
            f"simulate() got {len(programs)} programs over {n} ranks and {len(buffers)} buffers; "
            "allowed: one of each for every rank"
        )
    lengths = [buffer.numel() for buffer in buffers]
    if bounds is None and len(set(lengths)) > 1:
        raise UsageError(f"simulate() got buffers of {lengths} elements; allowed: one length")
    channels: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    cuts = bounds or [chunk_bounds(b.numel(), p) for p, b in zip(programs, buffers, strict=True)]
    ranks = [
        _Rank(p, Rows(p, buffer, cut, op), channels, depth)
        for p, buffer, cut in zip(programs, buffers, cuts, strict=True)
    ]
    while not all(r.done for r in ranks):
        moved = [r.advance() for r in ranks]
        if not any(moved):
            at = "\n".join(f"rank {r.program.rank}: {r.row}" for r in ranks if not r.done)
            raise ScheduleError(f"the programs stall with FIFO depth {depth}:\n{at}")


class _Rank:
    def __init__(
        self,
        program: Program,
        rows: Rows,
        channels: dict[tuple[int, int], deque[Tensor]],
        depth: int,
    ) -> None:
        self.program, self.rows, self.channels, self.depth = program, rows, channels, depth
        self.left = deque(program)

    @property
    def done(self) -> bool:
        return not self.left

    @property
    def row(self) -> Row:
        return self.left[0]

    def advance(self) -> bool:
        """Run the next row if its message is there and its slot is free. Returns whether it ran."""
        if self.done:
            return False
        row, rank = self.row, self.program.rank
        incoming = self.channels[row.recv_peer, rank]
        outgoing = self.channels[rank, row.send_peer]
        if row.recv_peer != NONE and not incoming:
            return False
        if row.send_peer != NONE and len(outgoing) >= self.depth:
            return False
        sent = self.rows.run(row, incoming.popleft() if row.recv_peer != NONE else None)
        if sent is not None:
            outgoing.append(sent)
        self.left.popleft()
        if self.done:
            self.rows.end()
        return True
