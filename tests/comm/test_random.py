"""Ten thousand random collectives, many in progress at once, equal the simulator bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringdp import Communicator, Work
from ringdp.transport.base import OPS
from tests.transport.test_conformance import (
    ALGORITHMS,
    NAMES,
    WHOLES,
    Case,
    digest,
    expected,
    input_of,
    root_of,
)

pytestmark = pytest.mark.process

CALLS, JOBS = 1000, 10
DEEPEST = 12  # calls in progress at once


def random_case(seed: int) -> Case:
    """The random case of a seed, the same on all ranks."""
    rng = random.Random(seed)
    collective = rng.choice(list(ALGORITHMS))
    algorithm = rng.choice((*ALGORITHMS[collective], "direct"))
    dtype = rng.choice(NAMES)
    ops = OPS if "float" not in dtype else OPS[:4]
    op = rng.choice(ops) if collective.startswith(("reduce", "all_reduce")) else "sum"
    most = rng.choice((2, 9, 60, 60, 60, 900) if seed % 400 else (100_000,))
    return Case(collective, algorithm, rng.randrange(most), dtype, op, seed)


def begin(comm: Communicator, case: Case) -> tuple[Work, Callable[[], bytes]]:
    """Begins the case; returns its work, and a function that digests the result after the wait."""
    n, me, k = comm.size, comm.rank, case.elements
    how = {"algorithm": case.algorithm, "async_op": True, "tag": case.seed}
    root, mine = root_of(case, n), input_of(case, me, n)
    output = torch.empty_like(mine)
    part = slice(me * k, (me + 1) * k) if case.collective in WHOLES else slice(None)
    result: Tensor = output
    match case.collective:
        case "all_reduce":
            work, result = comm.all_reduce(mine, case.op, **how), mine
        case "reduce":
            work, result = comm.reduce(mine, root, case.op, **how), mine
        case "broadcast":
            work, result = comm.broadcast(mine, root, **how), mine
        case "reduce_scatter":
            result = output[part]
            work = comm.reduce_scatter(result, mine, case.op, **how)
        case "all_gather":
            work = comm.all_gather(output, mine[part], **how)
        case "gather":
            work = comm.gather(output if me == root else None, mine[part], root, **how)
            result = output if me == root else mine
        case "scatter":
            result = output[part]
            work = comm.scatter(result, mine if me == root else None, root, **how)
        case _:
            work = comm.all_to_all(output, mine, **how)
    return work, lambda: digest(result)


def run_random_calls(comm: Communicator, first: int) -> tuple[list[bytes], dict[int, list[bytes]]]:
    """This rank's results and, for its share of the calls, what every rank's must be."""
    rng = random.Random(comm.rank)  # every rank waits in another order
    under_way: dict[int, tuple[Work, Callable[[], bytes]]] = {}
    found = [b""] * CALLS
    for call in range(CALLS):
        under_way[call] = begin(comm, random_case(first + call))
        depth = 0 if call % 50 == 0 or call == CALLS - 1 else rng.randrange(DEEPEST)
        while len(under_way) > depth:
            call_waited_for = rng.choice(list(under_way))
            work, result = under_way.pop(call_waited_for)
            work.wait()
            found[call_waited_for] = result()
    share = range(comm.rank, CALLS, comm.size)
    return found, {call: expected(random_case(first + call), comm.size) for call in share}


@pytest.mark.parametrize("first", [1 + job * CALLS for job in range(JOBS)])
def test_ten_thousand_random_collectives_equal_the_simulator(ranks, first):
    by_rank = ranks(4)(run_random_calls, first)
    for _, share in by_rank:
        for call, expected_digests in share.items():
            found = [results[call] for results, _ in by_rank]
            assert found == expected_digests, f"call {call}: {random_case(first + call)}"
