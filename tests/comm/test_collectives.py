"""What each collective gives, against torch's arithmetic; works; refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringdp
from ringdp import Communicator
from ringdp.comm.programs import program
from ringdp.schedule import project, schedule

pytestmark = pytest.mark.process


def values(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """Small integers as float32, so that every order of addition is exact."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-50, 50, shape, generator=generator).float()


def everyone(comm: Communicator, *shape: int, seed: int = 0) -> Tensor:
    return torch.stack([values(r, *shape, seed=seed) for r in range(comm.size)])  # [ranks, *shape]


def forms(comm: Communicator) -> None:
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
        assert big.count_nonzero() == expected.count_nonzero(), "written beside the view"

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
        "avg": (everyone(comm, 7) * (1 / n)).double().sum(0),
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


def scattered(comm: Communicator) -> None:
    n, mine = comm.size, comm.rank
    total = everyone(comm, n * 5).sum(0)
    own = total[mine * 5 :][:5]

    whole, out = values(mine, n * 5), torch.zeros(5)
    comm.reduce_scatter(out, whole)
    assert torch.equal(out, own)
    assert torch.equal(whole, values(mine, n * 5)), "the input stays"

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

    # Starts where the rank's part does, but is not it: another stride.
    base = values(mine, n * 4)
    begin = base[mine * 4 :]
    if mine == 0 and n > 1:
        strided = base.view(-1)[::2][:4]
        comm.reduce_scatter(strided, base)
        assert torch.equal(strided, everyone(comm, n * 4).sum(0)[:4])
    else:
        comm.reduce_scatter(begin[:4], base)
        assert torch.equal(begin[:4], everyone(comm, n * 4).sum(0)[mine * 4 :][:4])


def gathered(comm: Communicator) -> None:
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

    if n > 1:  # the input begins where the rank's part does, with another stride
        out = torch.arange(n * 4.0) + 100 * mine
        strided = out[::2][:4] if mine == 0 else out[mine * 4 :][:4]
        before = strided.clone()
        comm.all_gather(out, strided)
        assert torch.equal(out[mine * 4 :][:4], before)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("what", [forms, scattered, gathered])
def test_results_are_torchs(ranks, n: int, what: Callable[[Communicator], None]):
    ranks(n)(what)


def handles(comm: Communicator) -> None:
    tensors = [values(comm.rank, 2000 * i, seed=i) for i in range(12)]
    works = [comm.all_reduce(t, async_op=True) for t in tensors]
    for i in (11, 3, 3, 0, 7):  # out of order, and twice
        works[i].wait()
        assert works[i].is_completed()
        assert works[i].exception() is None
    assert all(w.is_completed() for w in works)  # they end in the order of issue
    for i, t in enumerate(tensors):
        assert torch.equal(t, everyone(comm, 2000 * i, seed=i).sum(0))

    view = values(comm.rank, 300, 300).t()  # a copy is reduced: it comes home with `wait`
    work = comm.all_reduce(view, async_op=True)
    while not work.is_completed():
        pass
    assert torch.equal(view, everyone(comm, 300, 300).sum(0).t())


def dropped(comm: Communicator) -> None:
    """Buffers of works that nobody holds are not given to others while they are in use."""
    for i in range(30):
        comm.all_reduce(torch.full((200_000,), float(comm.rank)), async_op=True)
        comm.all_reduce(values(comm.rank, 300, 300).t(), async_op=True)
        other = torch.full((200_000,), -7.0)
        for length in range(20):  # pushes chunk bounds out of a cache, if it is small
            comm.all_reduce(torch.ones(length + 20 * i), async_op=True)
        assert torch.all(other == -7.0)
    comm.barrier()


def kept(comm: Communicator) -> int:
    comm.all_reduce(torch.ones(10), async_op=True)
    comm.barrier()
    return len(comm._transport.kept)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("what", [handles, dropped])
def test_works(ranks, n: int, what: Callable[[Communicator], None]):
    ranks(n)(what)


def test_memory_is_kept_no_longer_than_needed(ranks):
    assert ranks(2)(kept) == [0, 0]


def two_threads(comm: Communicator) -> None:
    """A duplicate's collectives don't wait for the original's, in whatever order they come."""
    other = comm.duplicate()
    errors: list[BaseException] = []

    def run(on: Communicator, seed: int) -> None:
        try:
            for i in range(100):
                x = values(comm.rank, 37 * i, seed=seed)
                on.all_reduce(x)
                assert torch.equal(x, everyone(comm, 37 * i, seed=seed).sum(0))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(c, i)) for i, c in enumerate((comm, other))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors

    # opposite orders on the two ranks: one queue would be a mismatch, or wait for ever
    few, many = torch.ones(3), torch.ones(400_000)
    issue = [(comm, few), (other, many)]
    works = [c.all_reduce(x, async_op=True) for c, x in issue[:: -1 if comm.rank else 1]]
    for w in works[::-1]:
        w.wait()
    assert torch.all(few == comm.size)
    assert torch.all(many == comm.size)
    third = other.duplicate()
    third.barrier()
    third.close()
    other.close()


@pytest.mark.parametrize("n", [2, 3])
def test_duplicates_run_at_the_same_time(ranks, n: int):
    ranks(n)(same_lengths)
    ranks(n)(two_threads)


def same_lengths(comm: Communicator) -> None:
    with comm.duplicate() as other:
        x, y = values(comm.rank, 50), values(comm.rank, 50, seed=1)
        w = other.all_reduce(y, async_op=True)
        comm.all_reduce(x)
        w.wait()
        assert torch.equal(x + y, (everyone(comm, 50) + everyone(comm, 50, seed=1)).sum(0))


def refusals(comm: Communicator) -> list[str]:
    three, six, ten = torch.zeros(3), torch.zeros(6), torch.zeros(10)
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.bool), "avg"),
        lambda: comm.all_reduce(three, "mean"),  # type: ignore[arg-type]
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.int32), "avg"),
        lambda: comm.all_reduce(three, algorithm="magic"),
        lambda: comm.all_reduce(three, tag=-1),
        lambda: comm.all_reduce(three, tag=1 << 60),
        lambda: comm.all_reduce(three.to("meta")),
        lambda: comm.broadcast(three, 2),
        lambda: comm.broadcast(three, -1),
        lambda: comm.reduce_scatter(three, ten),
        lambda: comm.reduce_scatter(three, six.double()),
        lambda: comm.all_gather(ten, three),
        lambda: comm.all_gather_v(ten, three, [3, 3]),
        lambda: comm.all_gather_v(ten, three, [3, 7, 0]),
        lambda: comm.all_gather_v(ten, three, [13, -3]),
        lambda: comm.all_gather_v(ten, three, [3.0, 7.0]),  # type: ignore[list-item]
        lambda: comm.reduce_scatter_v(six, ten, [7, 3]),
        lambda: comm.gather(None if comm.rank == 0 else ten, three, root=2),
        lambda: comm.scatter(three, None, root=comm.rank),
        lambda: comm.all_to_all(six, ten),
        lambda: comm.all_to_all(three, three),
        lambda: comm.all_to_all_v(six, ten, [3, 3], [5, 6]),
        lambda: comm.all_to_all_v(ten, ten, [6 - 2 * comm.rank] * 2, [5, 5]),
        lambda: comm.all_to_all_v(ten, ten, [3 + comm.rank, 7 - comm.rank], [5, 5]),
        lambda: comm.all_reduce(torch.zeros(1).expand(3)),
        lambda: comm.broadcast(torch.zeros(1).expand(3), 1 - comm.rank),
        lambda: comm.all_reduce(three, "band"),
        lambda: comm.all_reduce(three, "max", scale=2),
        lambda: comm.all_reduce(three.int(), scale=2),
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.complex64), "max"),
        lambda: comm.all_reduce(torch.zeros(3, dtype=torch.uint16)),
        lambda: comm.all_reduce(torch.eye(3).to_sparse()),
    ]
    said = []
    for call in calls:
        with pytest.raises(ringdp.UsageError) as error:
            call()
        said.append(str(error.value))
    x = torch.ones(4)
    comm.all_reduce(x)  # a refused call took no number: the ranks still agree
    assert torch.all(x == 2)
    return said


def test_refusals_say_what_was_given_and_what_is_allowed(ranks):
    allowed = [
        ("bool", "floats"),
        ("mean", "avg"),
        ("int32", "floats"),
        ("magic", "ring"),
        ("-1", "0.."),
        (str(1 << 60), "0.."),
        ("meta", "CPU"),
        ("root is 2", "0..1"),
        ("root is -1", "0..1"),
        ("10", "2 (ranks) x 3"),
        ("float64", "float32"),
        ("10", "2 (ranks) x 3"),
        ("10", "6 (the sum of sizes)"),
        ("3, 7, 0", "each of 2 ranks"),
        ("13, -3", "0 or more"),
        ("3.0, 7.0", "whole numbers"),
        ("6", "sizes["),
        ("root is 2", "0..1"),
        ("input is None on the root", "a tensor"),
        ("10", "equally many"),
        ("3", "a multiple of 2"),
        ("input has 10", "input_sizes has 11"),
        ("output has 10", "output_sizes has"),
        ("expects", "the same"),
        ("expand()", "a place each"),
        ("expand()", "a place each"),
        ("band", "integers and bool"),
        ("max", "op 'sum'"),
        ("int32", "floats"),
        ("complex64", "sum and avg"),
        ("uint16", "bfloat16"),
        ("sparse", "dense"),
    ]
    for said in ranks(2)(refusals):
        for text, words in zip(said, allowed, strict=True):
            assert all(w in text for w in words), text


def only_one_refused(comm: Communicator) -> None:
    """A call refused on one rank only leaves the others' collective to be joined later."""
    if comm.rank == 0:
        with pytest.raises(ringdp.UsageError):
            comm.all_reduce(torch.zeros(3).to("meta"), "avg")
    x = torch.full((3,), float(comm.rank))
    comm.all_reduce(x)
    assert torch.all(x == 1)


def test_a_refusal_on_one_rank_is_no_collective(ranks):
    ranks(2)(only_one_refused)


@pytest.mark.parametrize("n", [16, 24])
def test_a_program_that_fuses_into_long_fifos_runs_unfused(n):
    """Fused halving needs 4 slots at n = 16 and 6 at n = 24; the plain program needs one."""
    plan = schedule("all_reduce", "halving", n)
    rows = len(program("all_reduce", "halving", n, 0, 0, 4).rows)
    assert (rows == len(project(plan, 0).rows)) == (n == 24)
