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


def _minimum(a: Tensor, b: Tensor) -> Tensor:
    """Like torch's, but with -0.0 < 0.0: which torch returns depends on their place in memory."""
    return torch.where(a == b, torch.where(torch.signbit(a), a, b), torch.minimum(a, b))


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a == b, torch.where(torch.signbit(a), b, a), torch.maximum(a, b))


COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
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
        self._op, self._ranks = op, program.ranks
        self._own = range(program.chunks)
        self._chunks = {c: buffer[bounds[c] : bounds[c + 1]] for c in self._own}
        self._sums: dict[int, Tensor] = {}  # 16-bit chunks that are being summed, in float32

    def room(self, row: Row) -> int | None:
        """Return the elements that the row's message must have; None: any, as in scratch."""
        free = row.dst_chunk not in self._own and not row.flags & REDUCE
        return None if free else self._chunks[row.dst_chunk].numel()

    def run(self, row: Row, received: Tensor | None) -> Tensor | None:
        """Run the row on the value it `received`, if any. Returns the value to send, if any."""
        value = self._read(row.src_chunk) if received is None else received
        if row.flags and self.room(row) not in (None, value.numel()):
            raise Unequal
        dtype = value.dtype
        if row.flags & REDUCE:
            value = COMBINE[self._op](self._wide(row.dst_chunk), widened(value))
        sent = None
        if row.send_peer != NONE:
            value = self._rounded(value, dtype)
            sent = value.clone()
        if row.flags & STORE:
            self._write(row.dst_chunk, value, dtype)
        return sent

    def end(self) -> None:
        """Round the sums that are left, after the last row."""
        for chunk in self._own:
            self._read(chunk)

    def _write(self, chunk: int, value: Tensor, dtype: torch.dtype) -> None:
        self._sums.pop(chunk, None)
        if value.dtype != dtype:
            self._sums[chunk] = value
        elif chunk in self._own:
            self._chunks[chunk].copy_(value)
        else:
            self._chunks[chunk] = value.clone()

    def _wide(self, chunk: int) -> Tensor:
        return self._sums[chunk] if chunk in self._sums else widened(self._chunks[chunk])

    def _read(self, chunk: int) -> Tensor:
        if chunk in self._sums:
            here = self._chunks[chunk]
            here.copy_(self._rounded(self._sums.pop(chunk), here.dtype))
        return self._chunks[chunk]

    def _rounded(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if value.dtype != dtype and self._op == "avg":
            value = divided(value, self._ranks)
        return value.to(dtype)


def divided(total: Tensor, by: int) -> Tensor:
    """Return total / by."""
    return total / divisor(total, by)


def divisor(total: Tensor, by: int) -> Tensor:
    """Return `by` as a tensor: on a GPU, torch would multiply by 1/number instead of dividing."""
    return torch.full((), by, dtype=total.dtype, device=total.device)


def widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
