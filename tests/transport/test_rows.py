"""What a rank sends does not change afterwards, and a chunk is received into its place."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
import torch
from torch import Tensor

from ringdp.comm.programs import program
from ringdp.schedule.algorithms import ALGORITHMS, Algorithm
from ringdp.transport.base import ReduceOp
from ringdp.transport.rows import Rows
from ringdp.transport.simulator import simulate

BY = [pytest.param(a, id=f"{a.collective}-{a.name}") for a in ALGORITHMS]


def simulated(
    by: Algorithm, n: int, depth: float | None, dtype: torch.dtype, op: ReduceOp
) -> list[Tensor]:
    programs = [program(by.collective, by.name, n, rank, 0, depth) for rank in range(n)]
    given = [torch.linspace(1, 2, 7 * n) * (rank + 1) for rank in range(n)]
    buffers = [x.to(dtype) for x in given]
    simulate(programs, buffers, op, depth=100)
    return buffers


@pytest.mark.parametrize("depth", [inf, None])
@pytest.mark.parametrize("by", BY)
def test_what_is_sent_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, by: Algorithm, depth: float | None
) -> None:
    """Also where messages are received right into their chunks, as a transport does."""
    plain, sent = Rows.run, list[tuple[Tensor, Tensor]]()

    def run(rows: Rows, at: int, received: Tensor | None) -> Tensor | None:
        place = rows.place(at)
        if received is not None and place is not None:
            received = place.copy_(received)
        value = plain(rows, at, received)
        if value is not None:
            sent.append((value, value.clone()))
        return value

    ops: list[ReduceOp] = ["sum", "avg", "max"]
    for n, dtype, op in product((2, 4), (torch.float32, torch.bfloat16), ops):
        want = simulated(by, n, depth, dtype, op)
        with monkeypatch.context() as patch:
            patch.setattr(Rows, "run", run)
            got = simulated(by, n, depth, dtype, op)
        assert all(map(torch.equal, got, want))
    assert sent
    assert all(torch.equal(value, before) for value, before in sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_passes_through_is_sent_without_a_copy(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A ring adds to what it has received and sends that on, whatever becomes of its own chunk."""

    def clone(_: Tensor) -> Tensor:
        raise AssertionError

    passing = program("all_reduce", "ring", 4, 0, 0, inf)
    rows = Rows(passing, torch.ones(4, dtype=dtype), range(5), "sum")
    monkeypatch.setattr(Tensor, "clone", clone)
    ran = [at for at, row in enumerate(passing) if row.name == "recv_reduce_send"]
    assert len(ran) == 2
    assert all(rows.run(at, torch.ones(1, dtype=dtype)) == 2 for at in ran)
