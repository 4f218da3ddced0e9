"""HOW a program is executed: what every transport does, and what they share.

A transport runs one rank's program on a flat buffer, in place. It is told sizes and dtypes here,
so that programs need not know them.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from ringdp.schedule.program import Program

Op = Literal["sum", "prod", "min", "max"]
OPS: tuple[Op, ...] = get_args(Op)

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


class Transport(Protocol):
    """Runs programs one after the other, in the order in which they were started."""

    rank: int
    ranks: int

    def start(self, program: Program, buffer: Tensor, op: Op, number: int, kind: int) -> int:
        """Begin `program` on `buffer` (1-D, contiguous) and return a ticket for `wait`.

        `number` and `kind` go with every message: a receiver that expects others raises
        CollectiveMismatch. The caller keeps `buffer` alive until `wait` returns True.
        """
        ...

    def wait(self, ticket: int, timeout: float) -> bool:
        """Whether that program ended within `timeout` seconds; raises CommunicationError."""
        ...

    def sent_bytes(self) -> int:
        """Payload bytes sent to other ranks so far."""
        ...

    def close(self) -> None: ...


def chunk_bounds(elements: int, chunks: int) -> list[int]:
    """Chunk c of a buffer is [bounds[c], bounds[c+1]): the first ones get the larger share.

    Chunks differ by at most one element; where `elements` is a multiple of `chunks`, they are equal.
    """
    small, larger = divmod(elements, chunks)
    return [c * small + min(c, larger) for c in range(chunks + 1)]
