"""The results of every collective, compared with torch's arithmetic."""

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


def check_all_reduce_and_broadcast(comm: Communicator) -> None:
    n, mine = comm.size, comm.rank
    expected = everyone(comm, 6, 5).sum(0)

    x = values(mine, 6, 5)
    comm.all_reduce(x)
    assert torch.equal(x, expected)

    for view in (
        lambda big: big[1:7, 2:7],
        lambda big: big.t()[:6, :5],
        lambda big: big[::2, ::2][:6, :5],
    ):
        big = torch.zeros(16, 16)
        view(big).copy_(values(mine, 6, 5))
        comm.all_reduce(view(big))
        assert torch.equal(view(big), expected)
        assert big.count_nonzero() == expected.count_nonzero(), "written outside the view"

    parameter = torch.nn.Parameter(values(mine, 5, 6)).t()
    comm.all_reduce(parameter)
    assert torch.equal(parameter, expected_t := everyone(comm, 5, 6).sum(0).t())
    assert expected_t.shape == (6, 5)

    scalar = torch.tensor(float(mine))
    comm.all_reduce(scalar)
    assert scalar == sum(range(n))

    for op, reference in {
        "prod": everyone(comm, 7).prod(0),
        "min": everyone(comm, 7).amin(0),
        "max": everyone(comm, 7).amax(0),
    }.items():
        x = values(mine, 7)
        comm.all_reduce(x, op)
        torch.testing.assert_close(x.double(), reference.double(), rtol=1e-6, atol=1e-5)

    for root in range(n):
        x = values(mine, 3, 4)
        comm.broadcast(x, root)
        assert torch.equal(x, values(root, 3, 4))
        x = values(mine, 4, 3).t()
        comm.broadcast(x, root)
        assert torch.equal(x, values(root, 4, 3).t())
    comm.barrier()


def check_reduce_scatter(comm: Communicator) -> None:
    n, mine = comm.size, comm.rank
    total = everyone(comm, n * 5).sum(0)
    own = total[mine * 5 :][:5]

    whole, out = values(mine, n * 5), torch.zeros(5)
    comm.reduce_scatter(out, whole)
    assert torch.equal(out, own)
    assert torch.equal(whole, values(mine, n * 5)), "the input is unchanged"

    whole = values(mine, n * 5)
    out = whole[mine * 5 :][:5]
    comm.reduce_scatter(out, whole)
    assert torch.equal(out, own)

    wide = torch.zeros(5, 2)
    comm.reduce_scatter(wide[:, 1], values(mine, n * 5))
    assert torch.equal(wide[:, 1], own)
    assert not wide[:, 0].any()

    grad = torch.zeros(5, requires_grad=True)
    comm.reduce_scatter(grad, values(mine, n * 5).requires_grad_())
    assert torch.equal(grad, own)

    # The output begins where the rank's part of the input does, but with another stride.
    base = values(mine, n * 4)
    begin = base[mine * 4 :]
    if mine == 0 and n > 1:
        strided = base.view(-1)[::2][:4]
        comm.reduce_scatter(strided, base)
        assert torch.equal(strided, everyone(comm, n * 4).sum(0)[:4])
    else:
        comm.reduce_scatter(begin[:4], base)
        assert torch.equal(begin[:4], everyone(comm, n * 4).sum(0)[mine * 4 :][:4])


def check_all_gather(comm: Communicator) -> None:
    n, mine = comm.size, comm.rank
    expected = everyone(comm, 5).reshape(-1)

    out = torch.zeros(n, 5)
    comm.all_gather(out, values(mine, 5))
    assert torch.equal(out.view(-1), expected)

    out = torch.zeros(n * 5)
    out[mine * 5 :][:5] = values(mine, 5)
    comm.all_gather(out, out[mine * 5 :][:5])
    assert torch.equal(out, expected)

    wide = torch.stack([values(mine, 5), torch.zeros(5)], 1)
    comm.all_gather(out, wide[:, 0])
    assert torch.equal(out, expected)

    out = torch.zeros(n * 5)
    comm.all_gather(out, values(mine, 5).requires_grad_())
    assert torch.equal(out, expected)
    assert not out.requires_grad

    if n > 1:  # the input begins where the rank's part of the output does, but with another stride
        out = torch.arange(n * 4.0) + 100 * mine
        strided = out[::2][:4] if mine == 0 else out[mine * 4 :][:4]
        before = strided.clone()
        comm.all_gather(out, strided)
        assert torch.equal(out[mine * 4 :][:4], before)


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
@pytest.mark.parametrize(
    "what",
    [
        check_all_reduce_and_broadcast,
        check_reduce_scatter,
        check_all_gather,
        check_averages,
        check_averages_are_rounded_once,
    ],
)
def test_results_equal_torchs(ranks, n: int, what: Callable[[Communicator], None]):
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
