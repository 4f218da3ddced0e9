"""A second call stays in C++, and is right, numbered, told and refused like the first."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringdp import Communicator, PeerLost, Work
from ringdp.comm.call import named, place
from ringdp.comm.job import How, Job
from tests.comm.failing import Heard, fallible, hear

pytestmark = pytest.mark.process

Call = Callable[[Communicator, Tensor, Tensor], Work]  # of a whole and a part of it

REPEATED: dict[str, Call] = {
    "all_reduce": lambda c, x, _: c.all_reduce(x),
    "op": lambda c, x, _: c.all_reduce(x, "max"),
    "op by name": lambda c, x, _: c.all_reduce(x, op="max"),
    "average": lambda c, x, _: c.all_reduce(x, "avg"),
    "tag": lambda c, x, _: c.all_reduce(x, tag=3),
    "defaults": lambda c, x, _: c.all_reduce(x, "sum", scale=None, async_op=False),
    "async": lambda c, x, _: c.all_reduce(x, "max", async_op=True, tag=2),
    "reduce_scatter, async": lambda c, x, p: c.reduce_scatter(p, x, async_op=True),
    "all_gather, async": lambda c, x, p: c.all_gather(x, p, async_op=True),
    "unbound": lambda c, x, _: Communicator.all_reduce(c, x),
    "barrier": lambda c, x, _: c.barrier(),  # type: ignore[func-returns-value]
    "reduce_scatter": lambda c, x, p: c.reduce_scatter(p, x),
    "reduce_scatter, op": lambda c, x, p: c.reduce_scatter(p, x, "min", tag=1),
    "all_gather": lambda c, x, p: c.all_gather(x, p),
}
OTHERS: dict[str, Call] = {
    "tensor by name": lambda c, x, _: c.all_reduce(tensor=x),
    "scale": lambda c, x, _: c.all_reduce(x, scale=2.0),
    "algorithm": lambda c, x, _: c.all_reduce(x, algorithm="ring"),
    "not flat": lambda c, x, _: c.all_reduce(x.view(-1, 2).t()),
    "broadcast": lambda c, x, _: c.broadcast(x),
}


def issued_by_python(comm: Communicator, call: Callable[[], object]) -> int:
    """How many of the calls."""
    seen: list[Job] = []
    issue = comm._issue

    def noted(job: Job, how: How) -> Work:
        seen.append(job)
        return issue(job, how)

    comm._issue = noted  # type: ignore[method-assign]
    try:
        call()
    finally:
        del comm._issue
    return len(seen)


def second_calls(comm: Communicator) -> None:
    if comm._ready is None:
        pytest.skip("an older torch")
    x, part = torch.ones(4 * comm.size), torch.ones(4)
    for times, calls in ((0, REPEATED), (1, OTHERS)):
        for name, call in calls.items():
            call(comm, x, part)
            before = comm.issued
            assert issued_by_python(comm, lambda c=call: c(comm, x, part)) == times, name  # type: ignore[misc]
            assert comm.issued == before + 1, name
            comm.barrier()


@pytest.mark.parametrize("n", [2, 4])
def test_which_calls_stay_in_c(ranks, n: int):
    ranks(n)(second_calls)


def within_a_group(comm: Communicator) -> None:
    xs = [torch.full((8,), comm.rank + 1.0) for _ in range(3)]
    comm.all_reduce(torch.ones(8))
    with comm.group():
        with comm.group():
            comm.all_reduce(xs[0])
        comm.all_reduce(xs[1])
    comm.all_reduce(xs[2])
    for x in xs:
        assert torch.equal(x, torch.full((8,), 3.0))


def test_a_group_takes_in_what_would_be_repeated(ranks):
    ranks(2)(within_a_group)


def under_way(comm: Communicator) -> None:
    """Several at once; nobody but the transport holds what one of them works on."""
    x, lengths = torch.ones(4), (4, 1 << 10, 1 << 18)
    for _ in range(3):
        works, kept = [], []
        for length in lengths:
            works.append(comm.all_reduce(torch.ones(length), async_op=True))
            kept.append(torch.full((length,), comm.rank + 1.0))
            works.append(comm.all_reduce(kept[-1], "max", async_op=True, tag=1))
        comm.all_reduce(x.fill_(1))
        assert x.tolist() == [comm.size] * 4
        for work in works:
            work.wait()
            assert work.is_completed()
        assert all(bool((y == comm.size).all()) for y in kept)
    assert not comm._transport.kept


@pytest.mark.parametrize("n", [2, 4])
def test_repeated_calls_in_the_background(ranks, n: int):
    ranks(n)(under_way)


@fallible
def differing(comm: Communicator) -> tuple[Heard | None, str, int]:
    x = torch.ones(8)
    calls = [lambda: comm.all_reduce(x), lambda: comm.all_reduce(x, "max")]
    for call in calls:  # both have been made before
        call()
    number = comm.issued
    return hear(comm, calls[comm.rank]), place(comm._ready.site()), number  # type: ignore[union-attr]


def test_ranks_that_repeat_different_calls_are_told_both(ranks):
    for heard, here, number in ranks(2)(differing):
        assert heard.error == heard.again == "CollectiveMismatch"
        for op in ("sum", "max"):
            assert f"all_reduce #{number} (float32, {op}) of 8 elements" in heard.text
        assert heard.text.count(here.rpartition(":")[0]) >= 2


@fallible
def alone(comm: Communicator, later: bool) -> Heard | None:
    x = torch.ones(8)
    comm.all_reduce(x)
    if comm.rank == 0:
        comm.set_timeout(0.3)
    else:  # until rank 0 has given up
        while comm._transport.failure() is None:
            time.sleep(0.01)
    return hear(comm, lambda: comm.all_reduce(x, async_op=later).wait())


@pytest.mark.parametrize("later", [False, True])
def test_a_repeated_call_times_out(ranks, later: bool):
    heard, _ = ranks(2)(alone, later)
    assert heard.error == heard.again == "CollectiveTimeout"
    assert "rank 0 waited for all_reduce #2 (float32, sum) of 8 elements" in heard.text
    assert f"{os.path.basename(__file__)}:" in heard.text


@fallible
def kept_after_a_failure(comm: Communicator) -> int:
    comm.all_reduce(torch.ones(8))
    if comm.rank == 1:
        comm.close()
        return 0
    for _ in range(10):
        with pytest.raises(PeerLost):
            comm.all_reduce(torch.ones(8))
    return len(comm._transport.kept)


def test_retries_after_a_failure_keep_nothing(ranks):
    assert ranks(2)(kept_after_a_failure)[0] <= 1  # the call that failed may still be read


def replaced(comm: Communicator) -> None:
    """The tensor gets other memory while the call is under way, and others get its."""
    with comm.duplicate() as other:
        x = torch.ones(200_000)
        for _ in range(2):
            other.all_reduce(x)
        if comm.rank == 0:
            work = other.all_reduce(x, async_op=True)
            x.data = torch.empty(0)
        others = [torch.full((200_000,), 7.0) for _ in range(4)]
        comm.barrier()
        if comm.rank == 1:
            work = other.all_reduce(x, async_op=True)
        work.wait()
        assert all(bool((y == 7).all()) for y in others)


def test_a_call_keeps_the_memory_that_it_began_with(ranks):
    ranks(2)(replaced)


def recorded(comm: Communicator) -> None:
    x = torch.ones(8, dtype=torch.int32)
    for _ in range(2):
        comm.all_reduce(x, "max", tag=5)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        number, kind, elements, site = comm._transport.call(comm.rank, comm.issued - 1)
        assert (number, elements) == (comm.issued - 1, 8)
        assert named(number, kind) == f"all_reduce #{number} (int32, max)"
        assert kind >> 24 == 5
        assert place(site).endswith(f"{__file__[-30:]}:{line}")


def test_a_repeated_call_is_on_record(ranks):
    ranks(2)(recorded)


def negated(comm: Communicator) -> None:
    z, pair = torch.zeros(1, dtype=torch.complex64), torch.zeros(2)
    for plain in (True, True, False, True, False):
        z.fill_(complex(0, comm.rank + 1))
        # each in the place and memory of the one before
        comm.all_reduce(z.imag if plain else z.conj().imag, "max")
        assert z.imag.item() == (2.0 if plain else 1.0)
        pair.fill_(comm.rank + 1.0)
        comm.all_reduce(pair if plain else torch._neg_view(pair), "max")  # type: ignore[attr-defined]
        assert pair.tolist() == [2.0 if plain else 1.0] * 2


def test_a_negated_tensor_in_the_place_of_a_plain_one(ranks):
    ranks(2)(negated)


def test_it_is_the_method_to_whoever_looks():
    assert list(inspect.signature(Communicator.all_reduce).parameters)[:3] == [
        "self",
        "tensor",
        "op",
    ]
    assert Communicator.all_reduce.__doc__.startswith("Every rank's `tensor`")
    assert Communicator.all_reduce.__qualname__ == "Reductions.all_reduce"
