"""A repeated call by a program, prepared in C++, has the bits of a first call, prepared in
Python."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ringdp import Communicator, Work
from tests.comm.test_repeated import issued_by_python, own_part
from tests.ranks import on_ranks
from tests.transport.test_conformance import ALGORITHMS, data, digest, star

pytestmark = pytest.mark.process


class Buffers(NamedTuple):
    """A call's buffers and options."""

    whole: Tensor
    part: Tensor
    other: Tensor  # as long as the whole
    root: int
    how: dict[str, object]
    op: tuple[str, ...]  # for collectives that reduce


Call = Callable[[Communicator, Buffers], Work]

CALLS: dict[str, Call] = {
    "all_reduce": lambda c, b: c.all_reduce(b.whole, *b.op, **b.how),  # type: ignore[arg-type]
    "reduce": lambda c, b: c.reduce(b.whole, b.root, *b.op, **b.how),  # type: ignore[arg-type]
    "reduce_scatter": lambda c, b: c.reduce_scatter(b.part, b.whole, *b.op, **b.how),  # type: ignore[arg-type]
    "broadcast": lambda c, b: c.broadcast(b.whole, b.root, **b.how),  # type: ignore[arg-type]
    "all_gather": lambda c, b: c.all_gather(b.whole, b.part, **b.how),  # type: ignore[arg-type]
    "gather": lambda c, b: c.gather(here(c, b), b.part, b.root, **b.how),  # type: ignore[arg-type]
    "scatter": lambda c, b: c.scatter(b.part, here(c, b), b.root, **b.how),  # type: ignore[arg-type]
    "all_to_all": lambda c, b: c.all_to_all(b.other, b.whole, **b.how),  # type: ignore[arg-type]
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def here(comm: Communicator, buffers: Buffers) -> Tensor | None:
    return buffers.whole if comm.rank == buffers.root else None


def calls(n: int) -> list[tuple[str, object, int, tuple[str, ...]]]:
    """(collective, algorithm, root, op)."""
    rows = [(c, name) for c, names in ALGORITHMS.items() for name in names if name != "direct"]
    rows += [("all_reduce", star), ("reduce", "direct")]
    roots = {
        "reduce": (0, n - 1),
        "gather": (0, n - 1),
        "scatter": (0, n - 1),
        "broadcast": (n - 1,),
    }
    return [
        (collective, algorithm, root, op)
        for collective, algorithm in rows
        for root in roots.get(collective, (0,))
        for op in ((("sum",), ("avg",)) if collective in REDUCING else ((),))
    ]


def digests_after(
    comm: Communicator, each: int, dtype: torch.dtype, call: tuple, apart: bool, later: bool
):
    """Digests of all tensors after the call."""
    collective, algorithm, root, op = call
    whole = data(comm.rank, comm.size * each, dtype, 1)
    part = data(comm.rank, each, dtype, 2) if apart else own_part(comm, whole)
    how = {"algorithm": algorithm, "async_op": later}
    buffers = Buffers(whole, part, torch.zeros_like(whole), root, how, op)
    CALLS[collective](comm, buffers).wait()
    return [digest(x) for x in buffers[:3]]


@pytest.mark.parametrize("each", [0, 5, 9_001])
@pytest.mark.parametrize("n", [1, 4])
@on_ranks()
def test_repeated_calls_have_the_bits_of_first_calls(comm: Communicator, each: int) -> None:
    ready = comm._ready
    for dtype, call, apart in product(DTYPES, calls(comm.size), (True, False)):
        if "avg" in call[3] and not dtype.is_floating_point:
            continue
        ready.forget()
        first = digests_after(comm, each, dtype, call, apart, later=False)

        def again(dtype=dtype, call=call, apart=apart, first=first) -> None:
            for later in (False, True):
                assert digests_after(comm, each, dtype, call, apart, later) == first, (
                    dtype,
                    call,
                    apart,
                    later,
                )

        overlap = each > 0 and not apart and call[0] == "scatter" and comm.rank == call[2]
        by_python = 2 * overlap
        assert issued_by_python(comm, again) == by_python, (dtype, call, apart)
