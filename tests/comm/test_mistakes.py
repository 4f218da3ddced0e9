"""A rank makes another call than the others: every rank gets an error with both calls and lines."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from ringdp import Communicator, Work
from ringdp.comm.call import fingerprint, named
from ringdp.schedule import Builder
from ringdp.transport.store import status
from tests.comm.failing import (
    RANKS,
    Caught,
    Form,
    assert_shows_both_calls,
    catch,
    duplicates,
    forms,
    held,
)
from tests.forks import CALL_TIMEOUT, Forks, Report
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


SUMS = (Form("reduce", "direct"), Form("all_reduce", "direct"), Form("reduce_scatter", "ring"))
OVER_GLOO = [
    (what, SUMS[0 if what == "root" else i % len(SUMS)])
    for i, what in enumerate(list(MISTAKES)[1:])
]


def make_mistakes(
    comm: Communicator,
    report: Report,
    transport: str,
    victim: int,
    earlier: int,
    chosen: list[tuple[str, Form]],
) -> None:
    """In each case the victim makes the mistake, after so many earlier calls."""
    status.PATIENCE = CALL_TIMEOUT  # a busy machine is slow
    before = held()
    for case in chosen:
        report(make_mistake(comm, transport, comm.rank == victim, earlier, *case))
    assert transport != "shm" or not held() - before


def make_mistake(
    comm: Communicator, transport: str, mine: bool, earlier: int, what: str, form: Form
) -> Caught | None:
    # over gloo it is the warning that detects ranks that all wait for one another
    (c,) = duplicates(comm, transport, 1, warn_after=0.2)
    with c:
        for _ in range(earlier):
            form.call(c, torch.ones(ELEMENTS))
        comm.barrier()  # otherwise a rank still in one of these could notice the mistake there
        call = MISTAKES[what if mine else "nothing"]
        caught = catch(c, lambda: call(form.call, c), c.barrier)
        comm.barrier()  # no rank closes before all have caught the error
    return caught


@pytest.mark.parametrize(
    ("transport", "n", "victim", "earlier", "chosen"),
    [
        *(("shm", n, n // 2, 0, cases(turn)) for turn, n in enumerate(RANKS)),
        ("c10d", 4, 3, 0, OVER_GLOO[0::3]),
        ("c10d", 2, 1, 1, OVER_GLOO[1::3]),
        ("c10d", 4, 0, 2, OVER_GLOO[2::3]),
        *(
            pytest.param("shm", n, n // 2, 0, cases(None), marks=pytest.mark.exhaustive)
            for n in RANKS
        ),
    ],
)
def test_a_mismatch_is_reported_on_all_ranks_with_both_lines(
    forks: Forks, transport, n, victim, earlier, chosen
):
    for rank, (code, reported) in enumerate(
        forks(n, make_mistakes, transport, victim, earlier, chosen)
    ):
        assert code == 0
        for case, h in zip(chosen, reported, strict=True):
            where = f"{case} on rank {rank} of {n}: {h}"
            assert h is not None, where
            assert h.error == h.again == "CollectiveMismatch", where
            assert_shows_both_calls(h.text, victim, where)


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


@pytest.mark.parametrize(("transport", "n"), [("shm", 2), ("shm", 4), ("shm", 8), ("c10d", 3)])
@on_ranks(pool="forked")
def test_different_roots_are_a_mismatch_and_not_a_timeout(
    comm: Communicator, transport: str
) -> None:
    """Each rank waits for another; no message shows that they disagree."""
    status.PATIENCE = CALL_TIMEOUT  # a busy machine is slow
    (c,) = duplicates(comm, transport, 1, warn_after=0.1)
    root = (comm.rank + 1) % comm.size
    h = catch(c, lambda: c.broadcast(torch.ones(100), root))
    comm.barrier()
    assert h.error == h.again == "CollectiveMismatch", h
    calls = r"^  rank \d: broadcast #1 .*(root \d)\) of 100 .*/test_mistakes.py:\d+$"
    assert len(set(re.findall(calls, h.text, re.M))) == 2, h
