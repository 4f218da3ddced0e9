"""Shared memory gives the simulator's bits: collective x algorithm x n x length x dtype x op."""

from __future__ import annotations

import random
import signal
from itertools import product

import pytest
import torch
from torch import Tensor

from ringdp import Communicator, ScheduleError
from ringdp.schedule import Schedule, Transfer, contract, fuse, project, schedule
from ringdp.transport.base import DTYPES, OPS
from ringdp.transport.simulator import simulate

pytestmark = pytest.mark.process

ALGORITHMS = {
    "all_reduce": ("ring", "two_way_ring", "direct", "halving", "doubling", "tree", "hierarchical"),
    "reduce_scatter": ("ring", "two_way_ring", "direct", "halving"),
    "all_gather": ("ring", "two_way_ring", "direct", "halving"),
    "broadcast": ("ring", "direct", "binomial"),
    "reduce": ("direct", "binomial"),
    "gather": ("direct", "binomial"),
    "scatter": ("direct", "binomial"),
    "all_to_all": ("direct", "pairwise"),
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
WHOLES = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")  # of size parts


def data(rank: int, elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Floats of all sizes with NaN, infinities and -0.0 among them; integers that overflow."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (elements,), generator=g).bool()
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (elements,), generator=g, dtype=dtype)
    x = torch.randn(elements, generator=g, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-4, 4, (elements,), generator=g)
    special = torch.randint(0, 40, (elements,), generator=g)
    for code, value in enumerate((float("inf"), -float("inf"), float("nan"), -0.0)):
        x[special == code] = value
    return x.to(dtype)


def expected(
    collective: str, algorithm: str, inputs: list[Tensor], op: str, root: int = 0
) -> list[Tensor]:
    n = len(inputs)
    plan = schedule(collective, algorithm, n, root)
    live = contract(collective, n, plan.chunks, root).after
    fused = [fuse(project(plan, r), {c for q, c in live if q == r}) for r in range(n)]
    buffers = [x.clone() for x in inputs]
    simulate(fused, buffers, op, depth=64)
    return buffers


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for which of the NaNs it is."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    numbers = ~(a.isnan() & b.isnan())
    as_bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(as_bits)[numbers], b.view(as_bits)[numbers])


def check(comm: Communicator, cases: list[tuple[str, str, int, str, str]]) -> int:
    n, me = comm.size, comm.rank
    for seed, (collective, algorithm, elements, dtype_name, op) in enumerate(cases):
        dtype = getattr(torch, dtype_name)
        whole = elements * n if collective in WHOLES else elements
        inputs = [data(r, whole, dtype, seed) for r in range(n)]
        root = seed % n if collective in ROOTED else 0
        want = expected(collective, algorithm, inputs, op, root)[me]
        mine = inputs[me].clone()
        part = slice(me * elements, (me + 1) * elements)
        output = torch.empty(whole, dtype=dtype)
        match collective:
            case "all_reduce":
                comm.all_reduce(mine, op, algorithm=algorithm)
                output = mine
            case "broadcast":
                comm.broadcast(mine, root, algorithm=algorithm)
                output = mine
            case "reduce":
                comm.reduce(mine, root, op, algorithm=algorithm)
                output, want = mine, want if me == root else inputs[me]
            case "reduce_scatter":
                output, want = output[part], want[part]
                comm.reduce_scatter(output, mine, op, algorithm=algorithm)
            case "all_gather":
                comm.all_gather(output, mine[part], algorithm=algorithm)
            case "gather":
                comm.gather(output if me == root else None, mine[part], root, algorithm=algorithm)
                output, want = (output, want) if me == root else (mine, inputs[me])
            case "scatter":
                output, want = output[part], want[part]
                comm.scatter(output, mine if me == root else None, root, algorithm=algorithm)
            case "all_to_all":
                comm.all_to_all(output, mine, algorithm=algorithm)
        assert same(output, want), (collective, algorithm, n, elements, dtype, op)
        if output is not mine:
            assert same(mine, inputs[me]), "the input stays"
    return len(cases)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_algorithm_length_and_dtype(ranks, n):
    names = [str(d).removeprefix("torch.") for d in DTYPES]
    lengths = sorted({0, 1, max(n - 1, 0), n, n + 1, 10007})
    cases = [
        (collective, algorithm, elements, dtype, "sum")
        for collective, algorithms in ALGORITHMS.items()
        for algorithm, elements, dtype in product(algorithms, lengths, names)
    ]
    assert ranks(n)(check, cases) == [len(cases)] * n


@pytest.mark.parametrize("n", [2, 3])
def test_every_op(ranks, n):
    names = [str(d).removeprefix("torch.") for d in DTYPES]
    cases = [
        ("all_reduce", algorithm, 1003, dtype, op)
        for algorithm, dtype, op in product(("direct", "ring"), names, OPS)
        if not (op in ("band", "bor", "bxor") and "float" in dtype)
    ]
    ranks(n)(check, cases)


@pytest.mark.parametrize("n", [2, 4])
def test_many_slabs(ranks, n):
    """Chunks of several FIFO slots, whose last one is not full."""
    cases = [
        (collective, algorithm, 300_007, "float32", "sum")
        for collective, algorithms in ALGORITHMS.items()
        for algorithm in algorithms
    ]
    ranks(n)(check, cases)


def test_eight_ranks(fresh_ranks):
    rng = random.Random(8)
    cases = [
        (collective, algorithm, rng.choice([1, 7, 9, 1000]), dtype, "sum")
        for collective, algorithms in ALGORITHMS.items()
        for algorithm in algorithms
        for dtype in ("float32", "bfloat16")
    ]
    fresh_ranks(8, timeout=60.0)(check, cases)


def slice_alone(comm: Communicator, algorithm: str) -> bool:
    """Whether an element's bits are the same in a long and in a short buffer."""
    g = torch.Generator().manual_seed(comm.rank)
    whole = torch.randn(10_000, generator=g)
    piece = whole[1234:1300].clone()
    comm.all_reduce(whole, algorithm=algorithm)
    comm.all_reduce(piece, algorithm=algorithm)
    return torch.equal(whole[1234:1300], piece)


def test_direct_rounds_an_element_the_same_wherever_it_lies(ranks):
    for n in (2, 3, 4):
        assert all(ranks(n)(slice_alone, "direct"))
    assert not all(ranks(4)(slice_alone, "ring")), "else this test shows nothing"


def star(n: int) -> Schedule:
    """A user's own all_reduce: rank 0 adds everything up and passes it on."""
    gather = tuple(Transfer(r, 0, 0, 0, True) for r in range(1, n))
    return Schedule(n, 1, (gather, tuple(Transfer(0, r, 0, 0, False) for r in range(1, n))))


def forgetful(n: int) -> Schedule:
    return Schedule(n, 1, star(n).rounds[:1])


def own_algorithms(comm: Communicator) -> str:
    x = torch.arange(1001) * (comm.rank + 1)
    comm.all_reduce(x, algorithm=star)
    assert torch.equal(x, torch.arange(1001) * (comm.size * (comm.size + 1) // 2))
    with pytest.raises(ScheduleError) as error:
        comm.all_reduce(x, algorithm=forgetful)
    return str(error.value)


def test_a_users_own_algorithm_runs_once_it_is_proved(ranks):
    for said in ranks(3)(own_algorithms):
        assert "rank 1 chunk 0 holds 1.0, the contract asks for 0.0+1.0+2.0" in said


def survivors_hear(comm: Communicator) -> str:
    import os

    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            comm.all_reduce(torch.ones(100_000))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_killed_rank_is_an_error_with_a_name_on_every_other(fresh_ranks):
    said = fresh_ranks(3).outcomes(survivors_hear)
    assert said[1] is None
    for rank in (0, 2):
        assert said[rank].startswith("PeerLost:")
        assert "rank 1" in said[rank]
