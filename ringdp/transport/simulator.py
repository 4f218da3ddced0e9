"""All ranks in one process: the bit-exact oracle of every other transport.

It runs the programs' rows in order over FIFO channels of bounded depth, a row at a time, one rank
after the other. The order of additions is the program's, so another transport that accumulates in
the same dtype gives the same bits, and tests compare with `==`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringdp.errors import ScheduleError
from ringdp.schedule.program import NONE, REDUCE, STORE, Program, Row
from ringdp.transport.base import Op, chunk_bounds


def _minimum(a: Tensor, b: Tensor) -> Tensor:
    """torch's, but -0.0 < 0.0: which of them torch returns depends on where they lie in memory."""
    return torch.where(a == b, torch.where(torch.signbit(a), a, b), torch.minimum(a, b))


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a == b, torch.where(torch.signbit(a), b, a), torch.maximum(a, b))


COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": _minimum,
    "max": _maximum,
}


def simulate(
    programs: Sequence[Program], buffers: Sequence[Tensor], op: Op = "sum", *, depth: int = 2
) -> None:
    """Run one program per rank on one flat buffer per rank, in place.

    float16 and bfloat16 are combined in float32 and rounded at every store and send. Raises
    ScheduleError, naming each rank's row, if the programs stall at this FIFO depth.
    """
    channels: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    ranks = [
        _Rank(p, buffer, channels, op, depth) for p, buffer in zip(programs, buffers, strict=True)
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
        buffer: Tensor,
        channels: dict[tuple[int, int], deque[Tensor]],
        op: Op,
        depth: int,
    ) -> None:
        self.program, self.channels, self.op, self.depth = program, channels, op, depth
        self.rows = list(program)
        self.next = 0
        bounds = chunk_bounds(buffer.numel(), program)
        self.chunks = {c: buffer[bounds[c] : bounds[c + 1]] for c in range(program.chunks)}

    @property
    def done(self) -> bool:
        return self.next == len(self.rows)

    @property
    def row(self) -> Row:
        return self.rows[self.next]

    def advance(self) -> bool:
        """Run the next row if its message is there and its slot is free; say whether it ran."""
        if self.done:
            return False
        row, rank = self.row, self.program.rank
        incoming = self.channels[row.recv_peer, rank]
        outgoing = self.channels[rank, row.send_peer]
        if row.recv_peer != NONE and not incoming:
            return False
        if row.send_peer != NONE and len(outgoing) >= self.depth:
            return False
        value = incoming.popleft() if row.recv_peer != NONE else self.chunks[row.src_chunk]
        if row.flags & REDUCE:
            value = combine(self.chunks[row.dst_chunk], value, self.op)
        if row.flags & STORE:
            if row.dst_chunk in range(self.program.chunks):
                self.chunks[row.dst_chunk].copy_(value)
            else:
                self.chunks[row.dst_chunk] = value.clone()
        if row.send_peer != NONE:
            outgoing.append(value.clone())
        self.next += 1
        return True


def combine(a: Tensor, b: Tensor, op: Op) -> Tensor:
    """a op b, in float32 for the 16-bit floats, rounded once to their dtype."""
    if a.dtype in (torch.float16, torch.bfloat16):
        return COMBINE[op](a.float(), b.float()).to(a.dtype)
    return COMBINE[op](a, b)
