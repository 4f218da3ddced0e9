"""What is done around a program in C++ has the bits of what Python does at a first call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ringdp import Communicator, Work
from tests.comm.test_repeated import issued_by_python, own
from tests.ranks import on_ranks
from tests.transport.test_conformance import ALGORITHMS, data, digest, star

pytestmark = pytest.mark.process


class Buffers(NamedTuple):
    """Of one call, and how it is made."""

    whole: Tensor
    part: Tensor
    other: Tensor  # as long as the whole
    root: int
    how: dict[str, object]
    op: tuple[str, ...]  # of those that reduce


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


def ways(n: int) -> list[tuple[str, object, int, tuple[str, ...]]]:
    """Collective, algorithm, root, op."""
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


def bits(comm: Communicator, each: int, dtype: torch.dtype, way: tuple, apart: bool, later: bool):
    """Of all tensors after the call."""
    collective, algorithm, root, op = way
    whole = data(comm.rank, comm.size * each, dtype, 1)
    part = data(comm.rank, each, dtype, 2) if apart else own(comm, whole)
    how = {"algorithm": algorithm, "async_op": later}
    buffers = Buffers(whole, part, torch.zeros_like(whole), root, how, op)
    CALLS[collective](comm, buffers).wait()
    return [digest(x) for x in buffers[:3]]


@pytest.mark.parametrize("each", [0, 5, 9_001])
@pytest.mark.parametrize("n", [1, 4])
@on_ranks()
def test_a_second_call_has_the_bits_of_the_first(comm: Communicator, each: int) -> None:
    ready = comm._ready
    if ready is None:
        pytest.skip("an older torch")
    for dtype, way, apart in product(DTYPES, ways(comm.size), (True, False)):
        if "avg" in way[3] and not dtype.is_floating_point:
            continue
        ready.held = True
        first = bits(comm, each, dtype, way, apart, later=False)
        ready.held = False

        def again(dtype=dtype, way=way, apart=apart, first=first) -> None:
            for later in (False, True):
                assert bits(comm, each, dtype, way, apart, later) == first, (
                    dtype,
                    way,
                    apart,
                    later,
                )

        overlap = each > 0 and not apart and way[0] == "scatter" and comm.rank == way[2]
        by_python = 2 * overlap
        assert issued_by_python(comm, again) == by_python, (dtype, way, apart)
