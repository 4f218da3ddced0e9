"""Averages, booleans and denormals, compared with torch's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor

from ringdp import Communicator
from tests.ranks import on_ranks
from tests.transport.over import over

pytestmark = pytest.mark.process


def values(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """Small integers as float32, so that every order of addition is exact."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-50, 50, shape, generator=generator).float()


def everyone(comm: Communicator, *shape: int, seed: int = 0) -> Tensor:
    return torch.stack([values(r, *shape, seed=seed) for r in range(comm.size)])  # [ranks, *shape]


def check_averages(comm: Communicator) -> None:
    """Averages of exact sums are the same by every algorithm and for every length."""
    n, mine, root = comm.size, comm.rank, comm.size - 1
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64):
        for each in (7, 5_000, 60_001):  # elements of a rank: sent in lines, as a whole, in tiles
            total = everyone(comm, n * each).sum(0).to(dtype.to_real())
            expected = (total / n).to(dtype)
            part = expected[mine * each :][:each]
            inputs = values(mine, n * each).to(dtype)
            for program in (False, True):
                ring, binomial = ("ring", "binomial") if program else ("direct", "direct")
                x = inputs.clone()
                comm.all_reduce(x, "avg", algorithm=ring)
                assert torch.equal(x, expected), (ring, dtype, each)
                shared = comm.empty(n * each, dtype=dtype.to_real()).copy_(inputs.real)
                comm.all_reduce(shared, "avg", algorithm=ring, async_op=True).wait()
                assert torch.equal(shared, expected.real)
                wide = torch.empty(each, 2, dtype=dtype)
                comm.reduce_scatter(wide[:, 1], inputs, "avg", algorithm=ring)
                assert torch.equal(wide[:, 1], part)
                x = inputs.clone()
                own = x[mine * each :][:each]
                comm.reduce_scatter_v(own, x, [each] * n, "avg", algorithm=ring)
                assert torch.equal(own, part)
                x = inputs.clone()
                comm.reduce(x, root, "avg", algorithm=binomial)
                assert torch.equal(x, expected if mine == root else inputs)


def check_averages_are_rounded_once(comm: Communicator) -> None:
    """Averages of 16-bit floats whose sums would be rounded or overflow in 16 bits."""
    n, mine, root = comm.size, comm.rank, comm.size - 1
    for dtype in (torch.float16, torch.bfloat16):
        drawn = torch.rand(n, n * 9, generator=torch.Generator().manual_seed(1))
        inputs = (20_000 + 40_000 * drawn).to(dtype)
        expected = (reduce(torch.add, inputs.float()) / n).to(dtype)
        for _ in range(2):  # the second round repeats the first one's calls
            x = inputs[mine].clone()
            comm.all_reduce(x, "avg")
            assert torch.equal(x, expected)
            x = inputs[mine].clone()
            comm.reduce(x, root, "avg")
            assert torch.equal(x, expected if mine == root else inputs[mine])
            part = torch.empty(9, dtype=dtype)
            comm.reduce_scatter(part, inputs[mine], "avg")
            assert torch.equal(part, expected[mine * 9 :][:9])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("what", [check_averages, check_averages_are_rounded_once])
def test_averages_equal_torchs(ranks, n: int, what: Callable[[Communicator], None]):
    ranks(n)(what)


def check_bytes_as_booleans(comm: Communicator) -> None:
    """`view(torch.bool)` makes true bytes other than 1."""
    all_bytes = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    given = all_bytes.repeat_interleave(4).repeat(20), all_bytes.repeat(80)
    a, b = given[0] != 0, given[1] != 0
    either, both = ("sum", "max", "bor"), ("prod", "min", "band")
    expected = {**dict.fromkeys(either, a | b), **dict.fromkeys(both, a & b), "bxor": a ^ b}
    for algorithm in ("direct", "ring"):
        for op, result in expected.items():
            x = given[comm.rank].clone()
            comm.all_reduce(x.view(torch.bool), op=op, algorithm=algorithm)
            assert (x != 0).equal(result), (algorithm, op)


@pytest.mark.parametrize("transport", ["shm", "c10d", "peer-host"])
@on_ranks(2)
def test_a_boolean_is_true_unless_its_byte_is_0(comm: Communicator, transport: str) -> None:
    over(comm, transport, check_bytes_as_booleans)


DENORMAL_BITS = 71362  # the bits of a denormal float32; twice that is denormal too


def check_denormals(comm: Communicator) -> None:
    """In lines, as a whole, and in tiles; and in rows."""
    for algorithm in ("direct", "ring"):
        for elements in (8, 1000, 1 << 18):
            bits = torch.full((elements,), DENORMAL_BITS, dtype=torch.int32)
            comm.all_reduce(bits.view(torch.float32), algorithm=algorithm)
            assert bits.eq(comm.size * DENORMAL_BITS).all()


@pytest.mark.parametrize("transport", ["shm", "c10d", "peer-host"])
@on_ranks(2)
def test_denormals_are_kept_by_every_thread(comm: Communicator, transport: str) -> None:
    torch.set_flush_denormal(True)
    try:
        over(comm, transport, check_denormals)
        assert torch.tensor(DENORMAL_BITS, dtype=torch.int32).view(torch.float32) * 1 == 0
    finally:
        torch.set_flush_denormal(False)
