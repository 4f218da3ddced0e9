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
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def simulate(
    programs: Sequence[Program],
    buffers: Sequence[Tensor],
    op: Op = "sum",
    *,
    depth: int = 2,
    bounds: Sequence[Sequence[int]] | None = None,
) -> None:
    """Run one program per rank on one flat buffer per rank, in place.

    `bounds` are each rank's chunk boundaries, by default those of `chunk_bounds`.
    A chunk of float16 or bfloat16 that is reduced into is float32 until its value is read: sent,
    copied or added elsewhere, or at the end; then it is rounded. Raises ScheduleError, naming each
    rank's row, if the programs stall at this FIFO depth.
    """
    channels: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    cuts = bounds or [chunk_bounds(b.numel(), p) for p, b in zip(programs, buffers, strict=True)]
    ranks = [
        _Rank(p, buffer, cut, channels, op, depth)
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
        buffer: Tensor,
        bounds: Sequence[int],
        channels: dict[tuple[int, int], deque[Tensor]],
        op: Op,
        depth: int,
    ) -> None:
        self.program, self.channels, self.op, self.depth = program, channels, op, depth
        self.rows = list(program)
        self.next = 0
        self.chunks = {c: buffer[bounds[c] : bounds[c + 1]] for c in range(program.chunks)}
        self.sums: dict[int, Tensor] = {}  # 16-bit chunks that are being summed, in float32

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
        value = incoming.popleft() if row.recv_peer != NONE else self.read(row.src_chunk)
        sends, dtype = row.send_peer != NONE, value.dtype
        if row.flags & REDUCE:
            value = COMBINE[self.op](self.wide(row.dst_chunk), _widened(value))
        if sends:
            value = value.to(dtype)
            outgoing.append(value.clone())
        if row.flags & STORE:
            self.write(row.dst_chunk, value, dtype)
        self.next += 1
        if self.done:
            for chunk in range(self.program.chunks):
                self.read(chunk)
        return True

    def write(self, chunk: int, value: Tensor, dtype: torch.dtype) -> None:
        self.sums.pop(chunk, None)
        if value.dtype != dtype:
            self.sums[chunk] = value
        elif chunk in range(self.program.chunks):
            self.chunks[chunk].copy_(value)
        else:
            self.chunks[chunk] = value.clone()

    def wide(self, chunk: int) -> Tensor:
        return self.sums[chunk] if chunk in self.sums else _widened(self.chunks[chunk])

    def read(self, chunk: int) -> Tensor:
        if chunk in self.sums:
            self.chunks[chunk].copy_(self.sums.pop(chunk))
        return self.chunks[chunk]


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
