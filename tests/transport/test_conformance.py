"""Shared memory gives the simulator's bits: collective x algorithm x n x length x dtype x op."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ringdp import Communicator, ScheduleError, Work
from ringdp.schedule import ALGORITHMS as REGISTERED
from ringdp.schedule import Program, Schedule, Transfer, contract, fuse, project, schedule
from ringdp.schedule.algorithms import COLLECTIVES
from ringdp.transport.base import DTYPES, OPS
from ringdp.transport.simulator import simulate
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

ALGORITHMS = {
    collective: tuple(a.name for a in REGISTERED if a.collective == collective)
    for collective in COLLECTIVES
    if collective != "all_to_all_v"  # whose parts have sizes of their own
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
NAMES = [str(d).removeprefix("torch.") for d in DTYPES]
# collectives on a buffer of `size` parts
WHOLES = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")


LONG = 1 << 20


class Case(NamedTuple):
    collective: str
    algorithm: str
    elements: int  # of a rank's part, where the collective has parts
    dtype: str
    op: str = "sum"
    seed: int = 0
    arena: int = 0  # buffers of every so many-th rank lie in the arena


def data(rank: int, elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Floats of many magnitudes with NaN, infinities and -0.0 among them; integers that
    overflow."""
    if elements > 2_003:  # repeats the first elements, which is faster and tests as much
        return data(rank, 2_003, dtype, seed).repeat(-(-elements // 2_003))[:elements].clone()
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


@pytest.fixture
def some_ranks(ranks, fresh_ranks):
    """The session's pool, or for more than 4 ranks a pool of this test's own."""
    return lambda n: ranks(n) if n <= 4 else fresh_ranks(n, timeout=900.0)


def input_of(case: Case, rank: int, n: int) -> Tensor:
    whole = case.elements * n if case.collective in WHOLES else case.elements
    return data(rank, whole, getattr(torch, case.dtype), case.seed)


def root_of(case: Case, n: int) -> int:
    return case.seed % n if case.collective in ROOTED else 0


def digest(result: Tensor) -> bytes:
    """A digest of the bits; all NaNs count as one."""
    if result.is_floating_point():
        result = torch.where(result.isnan(), torch.full_like(result, torch.nan), result)
    return hashlib.blake2b(result.contiguous().view(torch.uint8).numpy(), digest_size=8).digest()


@cache
def programs(collective: str, algorithm: str, n: int, root: int) -> list[Program]:
    plan = schedule(collective, algorithm, n, root)
    promise = contract(collective, n, plan.chunks, root)
    return [fuse(project(plan, r), promise.kept(r)) for r in range(n)]


def expected(case: Case, n: int) -> list[bytes]:
    """Digests of what every rank must have, computed by the simulator."""
    inputs = [input_of(case, r, n) for r in range(n)]
    root, k = root_of(case, n), case.elements
    buffers = [x.clone() for x in inputs]
    simulate(programs(case.collective, case.algorithm, n, root), buffers, case.op, depth=64)
    if case.collective in ("reduce_scatter", "scatter"):
        return [digest(b[r * k : (r + 1) * k]) for r, b in enumerate(buffers)]
    if case.collective in ("reduce", "gather"):  # the other ranks' buffers are unchanged
        return [digest(buffers[r] if r == root else inputs[r]) for r in range(n)]
    return [digest(b) for b in buffers]


def results_of(comm: Communicator, cases: list[Case]) -> list[bytes]:
    return [run(comm, case) for case in cases]


class Begun(NamedTuple):
    """A call of a case: its input, and what holds its result once the work is done."""

    work: Work
    input: Tensor
    result: Tensor


def begin(
    comm: Communicator, case: Case, place: Callable[[Tensor], Tensor] = lambda x: x, **how: Any
) -> Begun:
    """Calls the case's collective on tensors that `place` may copy to another place."""
    n, me, k = comm.size, comm.rank, case.elements
    root, mine = root_of(case, n), place(input_of(case, me, n))
    out, part = place(torch.empty_like(mine)), slice(me * k, (me + 1) * k)
    how["algorithm"] = case.algorithm
    match case.collective:
        case "all_reduce":
            return Begun(comm.all_reduce(mine, case.op, **how), mine, mine)
        case "broadcast":
            return Begun(comm.broadcast(mine, root, **how), mine, mine)
        case "reduce":
            return Begun(comm.reduce(mine, root, case.op, **how), mine, mine)
        case "reduce_scatter":
            work = comm.reduce_scatter(out[part], mine, case.op, **how)
            return Begun(work, mine, out[part])
        case "all_gather":
            return Begun(comm.all_gather(out, place(mine[part]), **how), mine, out)
        case "gather":
            work = comm.gather(out if me == root else None, mine[part], root, **how)
            return Begun(work, mine, out if me == root else mine)
        case "scatter":
            work = comm.scatter(out[part], mine if me == root else None, root, **how)
            return Begun(work, mine, out[part])
    return Begun(comm.all_to_all(out, mine, **how), mine, out)


def run(comm: Communicator, case: Case) -> bytes:
    in_arena = case.arena and comm.rank % case.arena == 0

    def place(x: Tensor) -> Tensor:
        return comm.empty(*x.shape, dtype=x.dtype).copy_(x) if in_arena else x.clone()

    _, mine, result = begin(comm, case, place)
    if result is not mine:
        assert digest(mine) == digest(input_of(case, comm.rank, comm.size)), (
            "the input is unchanged"
        )
    found = digest(result)
    result.fill_(7)  # at once, so a rank that still reads or writes it would be noticed
    assert torch.all(result == torch.full_like(result, 7))
    return found


def assert_simulators_bits(
    pool: Callable[..., list[list[bytes]]], n: int, cases: list[Case]
) -> None:
    """Asserts that the ranks' results are the simulator's; all cases run in one call of the
    pool."""
    cases = [case._replace(seed=i) for i, case in enumerate(cases)]
    by_rank = pool(results_of, cases)
    for i, case in enumerate(cases):
        assert [results[i] for results in by_rank] == expected(case, n), (n, case)


ROWS = [(collective, name) for collective, names in ALGORITHMS.items() for name in names]


def lengths(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 10007})


@pytest.mark.parametrize("n", range(1, 9))
def test_every_algorithm_with_sampled_lengths_and_dtypes(some_ranks, n):
    """A sample; `exhaustive` runs the whole product below."""
    sizes = lengths(n)
    cases = [
        Case(collective, algorithm, sizes[(i + row + n) % len(sizes)], dtype)
        for row, (collective, algorithm) in enumerate(ROWS)
        for i, dtype in enumerate(NAMES)
    ]
    assert_simulators_bits(some_ranks(n), n, cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", range(1, 9))
def test_every_algorithm_with_all_lengths_and_dtypes(some_ranks, n):
    cases = [
        Case(collective, algorithm, elements, dtype)
        for (collective, algorithm), elements, dtype in product(ROWS, lengths(n), NAMES)
    ]
    cases += [Case(*row, LONG // n + 7, dtype) for row, dtype in product(ROWS, NAMES)]
    assert_simulators_bits(some_ranks(n), n, cases)


@pytest.mark.parametrize("n", [2, 3])
def test_long_buffers(ranks, n):
    """Chunks of several slots and tiles of several parts, the last of them incomplete."""
    cases = [Case(*row, LONG // n + 7, "float32") for row in ROWS]
    cases += [Case("all_reduce", "direct", LONG, dtype) for dtype in NAMES]
    assert_simulators_bits(ranks(n), n, cases)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_buffers_of_all_or_of_every_other_rank_in_the_arena(ranks, n):
    dtypes = {1: ("float32", "bfloat16", "float64", "int8"), 2: ("float32", "float16", "int64")}
    cases = [
        Case(collective, "direct", elements, dtype, arena=arena)
        for arena in dtypes
        for collective, elements, dtype in product(
            ("all_reduce", "reduce_scatter", "all_gather", "broadcast"),
            (0, 1, 10007, 300_007),
            dtypes[arena],
        )
    ]
    assert_simulators_bits(ranks(n), n, cases)


@pytest.mark.parametrize("n", [2, 3])
def test_every_op(ranks, n):
    cases = [
        Case("all_reduce", algorithm, 1003, dtype, op)
        for algorithm, dtype, op in product(("direct", "ring"), NAMES, OPS)
        if not (op in ("band", "bor", "bxor") and "float" in dtype)
    ]
    assert_simulators_bits(ranks(n), n, cases)


def slice_alone(comm: Communicator, algorithm: str) -> bool:
    """Whether the same elements get the same bits in a long and in a short buffer."""
    g = torch.Generator().manual_seed(comm.rank)
    whole = torch.randn(10_000, generator=g)
    piece = whole[1234:1300].clone()
    comm.all_reduce(whole, algorithm=algorithm)
    comm.all_reduce(piece, algorithm=algorithm)
    return torch.equal(whole[1234:1300], piece)


def test_the_bits_of_direct_do_not_depend_on_the_buffers_length(ranks):
    for n in (2, 3, 4):
        assert all(ranks(n)(slice_alone, "direct"))
    assert not all(ranks(4)(slice_alone, "ring")), "otherwise this test could not fail"


def star(n: int) -> Schedule:
    """A user-defined all_reduce: rank 0 sums all inputs and sends the sum to all."""
    gather = tuple(Transfer(r, 0, 0, 0, True) for r in range(1, n))
    return Schedule(n, 1, (gather, tuple(Transfer(0, r, 0, 0, False) for r in range(1, n))))


def overwriting(n: int) -> Schedule:
    """A user-defined scatter: rank 0 overwrites what it has sent."""
    sends = tuple(Transfer(0, r, r, r, False) for r in range(1, n))
    return Schedule(n, n, (sends, tuple(Transfer(0, 0, 0, r, False) for r in range(1, n))))


def without_broadcast(n: int) -> Schedule:
    return Schedule(n, 1, star(n).rounds[:1])


@on_ranks(3)
def test_a_user_defined_algorithm_is_proved_and_run(comm: Communicator) -> None:
    x = torch.arange(1001) * (comm.rank + 1)
    comm.all_reduce(x, algorithm=star)
    assert torch.equal(x, torch.arange(1001) * (comm.size * (comm.size + 1) // 2))
    message = r"rank 1 chunk 0 holds 1\.0, the contract asks for 0\.0\+1\.0\+2\.0"
    with pytest.raises(ScheduleError, match=message):
        comm.all_reduce(x, algorithm=without_broadcast)


@on_ranks(3)
def test_a_user_defined_scatter_leaves_its_input_as_it_is(comm: Communicator) -> None:
    whole, part = torch.arange(6), torch.empty(2, dtype=torch.int64)
    comm.scatter(part, whole, algorithm=overwriting)
    assert torch.equal(whole, torch.arange(6))
    assert torch.equal(part, whole[2 * comm.rank : 2 * comm.rank + 2])
