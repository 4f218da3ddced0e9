"""Ten thousand random collectives, many in progress at once, equal the simulator bit for bit."""

from __future__ import annotations

import random

import pytest
from torch import Tensor

from ringdp import Communicator, Work
from ringdp.transport.base import OPS
from tests.transport.test_conformance import (
    ALGORITHMS,
    NAMES,
    Case,
    begin,
    digest,
    expected,
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


def run_random_calls(comm: Communicator, first: int) -> tuple[list[bytes], dict[int, list[bytes]]]:
    """This rank's results and, for its share of the calls, what every rank's must be."""
    rng = random.Random(comm.rank)  # every rank waits in another order
    under_way: dict[int, tuple[Work, Tensor]] = {}  # inputs are kept by the transport alone
    found = [b""] * CALLS
    for call in range(CALLS):
        case = random_case(first + call)
        work, _, result = begin(comm, case, async_op=True, tag=case.seed)
        under_way[call] = work, result
        depth = 0 if call % 50 == 0 or call == CALLS - 1 else rng.randrange(DEEPEST)
        while len(under_way) > depth:
            call_waited_for = rng.choice(list(under_way))
            work, result = under_way.pop(call_waited_for)
            work.wait()
            found[call_waited_for] = digest(result)
    share = range(comm.rank, CALLS, comm.size)
    return found, {call: expected(random_case(first + call), comm.size) for call in share}


@pytest.mark.parametrize("first", [1 + job * CALLS for job in range(JOBS)])
def test_ten_thousand_random_collectives_equal_the_simulator(ranks, first):
    by_rank = ranks(4)(run_random_calls, first)
    for _, share in by_rank:
        for call, expected_digests in share.items():
            found = [results[call] for results, _ in by_rank]
            assert found == expected_digests, f"call {call}: {random_case(first + call)}"
