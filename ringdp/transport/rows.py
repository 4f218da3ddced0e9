"""What one row of a program does to a rank's buffer, in torch; the transport moves the messages.

A float16 or bfloat16 chunk that is reduced into is held in float32, and rounded when its value is
read: sent, copied, added elsewhere, or at the end. csrc does the same (its Note [one rounding]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringdp.schedule.program import NONE, REDUCE, STORE, Program, Row
from ringdp.transport.base import ReduceOp


def _minimum(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Like torch's, but with -0.0 < 0.0: which torch returns depends on their place in memory."""
    ties, others = torch.where(torch.signbit(a), a, b), torch.minimum(a, b)
    return torch.where(a == b, ties, others, out=out)


def _maximum(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    ties, others = torch.where(torch.signbit(a), b, a), torch.maximum(a, b)
    return torch.where(a == b, ties, others, out=out)


COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {  # of two tensors, into `out` if it is given
    "sum": torch.add,
    "avg": torch.add,  # `divided` where it is rounded
    "prod": torch.mul,
    "min": _minimum,
    "max": _maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class Unequal(Exception):
    """A value differs in length from its destination chunk: a peer assumed another length."""


class Rows:
    """One rank's chunks while its program runs."""

    def __init__(
        self, program: Program, buffer: Tensor, bounds: Sequence[int], op: ReduceOp
    ) -> None:
        self._program, self._op = program, op
        self._own = range(program.chunks)
        self._chunks = {c: buffer[bounds[c] : bounds[c + 1]] for c in self._own}
        self._sums: dict[int, Tensor] = {}  # 16-bit chunks that are being summed, in float32

    def room(self, row: Row) -> int | None:
        """Return the elements that the row's message must have; None: any, as in scratch."""
        free = row.dst_chunk not in self._own and not row.flags & REDUCE
        return None if free else self._chunks[row.dst_chunk].numel()

    def place(self, at: int) -> Tensor | None:
        """Return the chunk that row `at` may receive right into, if there is one."""
        row = self._program.listed[at]
        if row.flags != STORE or row.dst_chunk not in self._own:
            return None
        return self._chunks[row.dst_chunk]

    def run(self, at: int, received: Tensor | None) -> Tensor | None:
        """Run row `at`. Returns the value to send, if any, which stays as it is from now on.

        `received`, if any, is the row's `place` or belongs to it from now on.
        """
        row = self._program.listed[at]
        value, holder = received, NONE  # the chunk whose memory the value is in
        if value is None:
            value, holder = self._read(row.src_chunk), row.src_chunk
        elif value is self._chunks.get(row.dst_chunk):
            holder = row.dst_chunk
        if row.flags and self.room(row) not in (None, value.numel()):
            raise Unequal
        dtype = value.dtype
        if row.flags & REDUCE:
            value, holder = self._reduced(row, value, holder)
        if row.send_peer != NONE and value.dtype != dtype:
            value, holder = self._rounded(value, dtype), NONE
        if row.flags & STORE:
            holder = self._write(row.dst_chunk, value, dtype, holder)
        if row.send_peer == NONE:
            return None
        return value.clone() if self._program.last_store.get(holder, NONE) > at else value

    def end(self) -> None:
        """Round the sums that are left, after the last row."""
        for chunk in self._own:
            self._read(chunk)

    def _reduced(self, row: Row, value: Tensor, holder: int) -> tuple[Tensor, int]:
        """Return the sum, or what the operation is, in memory that need not be kept; its holder."""
        here, other = self._wide(row.dst_chunk), widened(value)
        if row.flags & STORE:
            return COMBINE[self._op](here, other, out=here), row.dst_chunk
        free = holder == NONE or other is not value
        return COMBINE[self._op](here, other, out=other if free else None), NONE

    def _write(self, chunk: int, value: Tensor, dtype: torch.dtype, holder: int) -> int:
        """Store the value. Returns its holder from now on."""
        self._sums.pop(chunk, None)
        if value.dtype != dtype:
            self._sums[chunk] = value
        elif chunk in self._own:
            if holder != chunk:
                self._chunks[chunk].copy_(value)
        elif holder == NONE:
            self._chunks[chunk] = value
            return chunk
        elif holder != chunk:
            self._chunks[chunk] = value.clone()
        return holder

    def _wide(self, chunk: int) -> Tensor:
        return self._sums[chunk] if chunk in self._sums else widened(self._chunks[chunk])

    def _read(self, chunk: int) -> Tensor:
        if chunk in self._sums:
            here = self._chunks[chunk]
            here.copy_(self._rounded(self._sums.pop(chunk), here.dtype))
        return self._chunks[chunk]

    def _rounded(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if value.dtype != dtype and self._op == "avg":
            value = divided(value, self._program.ranks)
        return value.to(dtype)


def divided(total: Tensor, by: int) -> Tensor:
    """Return total / by."""
    return total / divisor(total, by)


def divisor(total: Tensor, by: int) -> Tensor:
    """Return `by` as a tensor: on a GPU, torch would multiply by 1/number instead of dividing."""
    return torch.full((), by, dtype=total.dtype, device=total.device)


def widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
