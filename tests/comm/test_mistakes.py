"""A rank makes another call than the others: every rank gets an error with both calls and lines."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from ringdp import Communicator, Work
from ringdp.comm.call import fingerprint, named
from ringdp.schedule import Builder
from tests.comm.failing import RANKS, Caught, Form, assert_shows_both_calls, catch, forms, held
from tests.forks import Forks, Report
from tests.ranks import on_ranks
from tests.transport.test_conformance import star

pytestmark = pytest.mark.process

ELEMENTS = 100

Begin = Callable[..., Work]
MISTAKES: dict[str, Callable[[Begin, Communicator], Work]] = {
    "nothing": lambda begin, c: begin(c, torch.ones(ELEMENTS)),
    "collective": lambda begin, c: c.all_reduce(torch.ones(7, 3), algorithm="ring"),
    "barrier": lambda _, c: c.barrier(async_op=True),
    "length": lambda begin, c: begin(c, torch.ones(ELEMENTS - 1)),
    "much longer": lambda begin, c: begin(c, torch.ones(ELEMENTS * 3000)),
    "dtype": lambda begin, c: begin(c, torch.ones(ELEMENTS, dtype=torch.int32)),
    "tag": lambda begin, c: begin(c, torch.ones(ELEMENTS), tag=7),
    "op": lambda begin, c: begin(c, torch.ones(ELEMENTS), op="max"),
    "average": lambda begin, c: begin(c, torch.ones(ELEMENTS), op="avg"),
    "root": lambda begin, c: begin(c, torch.ones(ELEMENTS), root=1),
}
REDUCE, ROOTED = (
    {"all_reduce", "reduce_scatter", "reduce"},
    {"broadcast", "reduce", "gather", "scatter"},
)
HAVE = {"op": REDUCE, "average": REDUCE, "root": ROOTED}


def cases(turn: int | None) -> list[tuple[str, Form]]:
    """All; or in three turns every mistake once in every collective of equal parts."""
    return [
        (what, form)
        for i, what in enumerate(list(MISTAKES)[1:])
        for j, form in enumerate(forms(turn))
        if what not in HAVE or form.name in HAVE[what]
        if turn is None or (i + j + turn) % 3 == 0
    ]


def make_mistakes(comm: Communicator, report: Report, turn: int | None) -> None:
    """The middle rank makes the mistake in each case."""
    before = held()
    for case in cases(turn):
        report(make_mistake(comm, *case))
    assert not held() - before


def make_mistake(comm: Communicator, what: str, form: Form) -> Caught | None:
    mine = comm.rank == comm.size // 2
    with comm.duplicate() as c:
        c.barrier()  # collective 0
        comm.barrier()  # otherwise a rank still in that barrier could notice the mistake there
        call = MISTAKES[what if mine else "nothing"]
        caught = catch(c, lambda: call(form.call, c), c.barrier)
        comm.barrier()  # no rank closes before all have caught the error
    return caught


@pytest.mark.parametrize(
    ("n", "turn"),
    [
        *((n, turn) for turn, n in enumerate(RANKS)),
        *(pytest.param(n, None, marks=pytest.mark.exhaustive) for n in RANKS),
    ],
)
def test_a_mismatch_is_reported_on_all_ranks_with_both_lines(forks: Forks, n, turn):
    for rank, (code, reported) in enumerate(forks(n, make_mistakes, turn)):
        assert code == 0
        for case, h in zip(cases(turn), reported, strict=True):
            where = f"{case} on rank {rank} of {n}: {h}"
            assert h is not None, where
            assert h.error == h.again == "CollectiveMismatch", where
            assert_shows_both_calls(h.text, n // 2, where)


@pytest.mark.parametrize("n", [2, 4])
@on_ranks(pool="forked")
def test_different_algorithms_are_a_mismatch_and_not_a_timeout(comm: Communicator) -> None:
    """A direct exchange and two programs: some ranks get no message of a rank that disagrees."""
    x, ways = torch.ones(100), ("direct", "ring", star)
    for way in ways:
        comm.all_reduce(x, algorithm=way)
    h = catch(comm, lambda: comm.all_reduce(x, algorithm=ways[comm.rank % 3]))
    assert h.error == h.again == "CollectiveMismatch", h
    by = {0: "sum", 1: "sum, by ring", 2: "sum, by an algorithm of yours"}
    calls = re.findall(r"^  rank (\d): all_reduce #3 \(float32, (.*)\) of 100", h.text, re.M)
    assert len(calls) == 2, h
    assert all(way == by[int(rank) % 3] for rank, way in calls), h


@on_ranks(2, pool="forked")
def test_different_ops_of_one_algorithm_are_a_mismatch(comm: Communicator) -> None:
    """Only the digests of their messages differ."""
    x, op = torch.ones(8), ("sum", "max")[comm.rank]
    h = catch(comm, lambda: comm.all_reduce(x, op, algorithm="ring"))
    assert h.error == h.again == "CollectiveMismatch", h


@pytest.mark.parametrize("passed", [[[3, 1], [1, 3]], [[1, 3], [1, 2]]], ids=["cut", "longer"])
@on_ranks(2, pool="forked")
def test_other_sizes_are_a_mismatch(comm: Communicator, passed: list[list[int]]) -> None:
    """Also with equal totals: then a rank reads its part out of another's data at the wrong
    place."""
    sizes = passed[comm.rank]
    own, all_ = torch.ones(sizes[comm.rank]), torch.ones(sum(sizes))
    for call in (
        lambda c: c.reduce_scatter_v(own, all_, sizes),
        lambda c: c.all_gather_v(all_, own, sizes),
        lambda c: c.all_gather_v(all_, own, sizes, algorithm="ring"),
    ):
        with comm.duplicate() as c:
            c.barrier()
            h = catch(c, lambda c=c, call=call: call(c), c.barrier)
            comm.barrier()
            assert h.error == h.again == "CollectiveMismatch", h


@pytest.mark.parametrize(
    ("algorithm", "by"),
    [
        ("direct", ""),
        ("hierarchical:4", ", by hierarchical"),
        ("mine.py:star", ", by an algorithm of yours"),
        (star, ", by an algorithm of yours"),
    ],
)
def test_errors_name_the_algorithm(algorithm: str | Builder, by: str):
    kind = fingerprint("all_reduce", torch.float32, "sum", 0, algorithm)
    assert named(3, kind) == f"all_reduce #3 (float32, sum{by})"


@pytest.mark.parametrize("n", [2, 4, 8])
@on_ranks(pool="forked")
def test_different_roots_are_a_mismatch_and_not_a_timeout(comm: Communicator) -> None:
    """Each rank waits for another; no message shows that they disagree."""
    root = (comm.rank + 1) % comm.size
    h = catch(comm, lambda: comm.broadcast(torch.ones(100), root))
    assert h.error == h.again == "CollectiveMismatch", h
    assert len(set(re.findall(r"^  rank \d: broadcast .*(root \d)\)", h.text, re.M))) == 2
