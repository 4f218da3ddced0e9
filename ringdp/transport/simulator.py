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

Channels = dict[tuple[int, int], deque[Tensor]]  # by (sender, receiver)


def simulate(
    programs: Sequence[Program],
    buffers: Sequence[Tensor],
    op: ReduceOp = "sum",
    *,
    depth: int = 2,
) -> None:
    """Run one program per rank on one flat buffer per rank, in place.

    Raises UsageError if a rank's program or buffer is missing, or if buffers differ in length.
    Raises ScheduleError, naming each rank's row, if the programs stall at this FIFO depth.
    """
    n = programs[0].ranks if programs else 0
    if not len(programs) == len(buffers) == n:
        raise UsageError(
            f"simulate() got {len(programs)} programs over {n} ranks and {len(buffers)} buffers; "
            "allowed: one of each for every rank"
        )
    lengths = [buffer.numel() for buffer in buffers]
    if len(set(lengths)) > 1:
        raise UsageError(f"simulate() got buffers of {lengths} elements; allowed: one length")
    channels: Channels = defaultdict(deque)
    ranks = [
        (p.rank, deque(enumerate(p)), Rows(p, buffer, chunk_bounds(buffer.numel(), p), op))
        for p, buffer in zip(programs, buffers, strict=True)
    ]
    while any(left for _, left, _ in ranks):
        moved = [_advance(*rank, channels, depth) for rank in ranks]
        if not any(moved):
            at = "\n".join(f"rank {rank}: {left[0][1]}" for rank, left, _ in ranks if left)
            raise ScheduleError(f"the programs stall with FIFO depth {depth}:\n{at}")
    for _, _, rows in ranks:
        rows.end()


def _advance(
    rank: int, left: deque[tuple[int, Row]], rows: Rows, channels: Channels, depth: int
) -> bool:
    """Run a rank's next row if its message and its slot are there. Returns whether it ran."""
    if not left:
        return False
    at, row = left[0]
    receives, sends = row.recv_peer != NONE, row.send_peer != NONE
    incoming, outgoing = channels[row.recv_peer, rank], channels[rank, row.send_peer]
    if (receives and not incoming) or (sends and len(outgoing) >= depth):
        return False
    sent = rows.run(at, incoming.popleft() if receives else None)
    if sent is not None:
        outgoing.append(sent.clone())  # the receiver's own from now on
    left.popleft()
    return True
