"""Ranks that disagree about the sizes of parts: every rank gets an error that names a pair of
them."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch

from ringdp import Communicator
from ringdp.comm.call import fingerprint
from ringdp.comm.guard import _disagreement
from ringdp.transport.base import Failure, FailureKind
from ringdp.transport.records import SITE_BYTES, RankRecord
from ringdp.transport.store.status import State, Survey
from tests.comm.failing import by_turns, catch, fallible
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

PART = 6  # elements of a part, where all are equal
LINES = 64  # the longest small message
LARGE = 50_000  # several slabs

SITE = b"train.py:40".ljust(SITE_BYTES, b"\0")

Sizes = list[int]

MESSAGE = re.compile(
    r"  rank (\d) found a message of (\d+) bytes of collective #1 from rank (\d) "
    r"where it expected a message of (\d+) bytes of collective #1"
)


def shift_one(sizes: Sizes) -> Sizes:
    """The same total."""
    return [sizes[0] - 1, sizes[1] + 1, *sizes[2:]]


def one_less(sizes: Sizes) -> Sizes:
    """One element less on the last rank."""
    return [*sizes[:-1], sizes[-1] - 1]


def all_zero(sizes: Sizes) -> Sizes:
    return [0] * len(sizes)


def begin(comm: Communicator, what: str, sizes: Sizes) -> None:
    me = comm.rank
    whole, part = torch.zeros(sum(sizes)), torch.zeros(sizes[me])
    match what:
        case "all_gather_v":
            comm.all_gather_v(whole, part, sizes)
        case "all_gather_v by ring":
            comm.all_gather_v(whole, part, sizes, algorithm="ring")
        case "reduce_scatter_v":
            comm.reduce_scatter_v(part, whole, sizes)
        case "gather_v":
            comm.gather_v(whole if me == 0 else None, part, sizes)
        case "scatter_v":
            comm.scatter_v(part, whole if me == 0 else None, sizes)


WHATS = ("all_gather_v", "all_gather_v by ring", "reduce_scatter_v", "gather_v", "scatter_v")


@pytest.mark.parametrize(
    ("odd", "part", "what", "n"),
    by_turns(product((shift_one, one_less, all_zero), (PART, LINES), WHATS), (2, 3, 4)),
)
@on_ranks()
@fallible
def test_different_sizes_are_a_mismatch_on_all_ranks(
    comm: Communicator, odd: Callable[[Sizes], Sizes], part: int, what: str
) -> None:
    """Rank 1 passes other sizes than the others."""
    sizes = [part] * comm.size
    mine = odd(sizes) if comm.rank == 1 else sizes
    h = catch(comm, lambda: begin(comm, what, mine), comm.barrier)
    assert h is not None, f"{what} raised no error"
    assert h.error == h.again == "CollectiveMismatch", h
    first, *calls = h.text.splitlines()[:4]
    assert re.fullmatch(r"ranks (1 and \d|\d and 1) called differently:", first), h
    for call in calls[:2]:
        assert f": {what.partition('_v')[0]} #1 (float32" in call, h
        assert "/test_sizes.py:" in call, h
    counted = {call.partition(") of ")[2].partition(" ")[0] for call in calls[:2]}
    why = MESSAGE.fullmatch(calls[2]) if "ring" in what else calls[2] == "  with different sizes"
    assert len(counted) == 2 or why, h


PARTS = ((PART, 1), (0, 1), (LARGE, 1), (PART, -PART), (PART, -1), (LARGE, -LARGE))


@pytest.mark.parametrize(("part", "more", "n"), by_turns(PARTS, (2, 3, 4)))
@on_ranks()
@fallible
def test_a_part_of_another_size_is_a_mismatch_on_all_ranks(
    comm: Communicator, part: int, more: int
) -> None:
    """Rank 1 sends rank 0 more or less than it expects; all other parts are as expected."""
    received = [part] * comm.size
    sent = [part + more * (comm.rank == 1), *received[1:]]

    def call() -> None:
        out = torch.zeros(sum(received))
        comm.all_to_all_v(out, torch.zeros(sum(sent)), received, sent)

    h = catch(comm, call, comm.barrier)
    assert h is not None, "no error was raised"
    assert h.error == h.again == "CollectiveMismatch", h
    first, zero, one, why = h.text.splitlines()[:4]
    assert first == "ranks 0 and 1 called differently:", h
    for rank, line in enumerate((zero, one)):
        assert line.startswith(f"  rank {rank}: all_to_all_v #1 (float32) of "), h
        assert "/test_sizes.py:" in line, h
    found = MESSAGE.fullmatch(why)
    if found is None:  # the slabs are equal, only their number differs
        assert why == "  with different sizes", h
    else:
        rank, found_bytes, other, expected = map(int, found.groups())
        assert (rank, other) == (0, 1), h
        assert (found_bytes > expected) == (more > 0), h


@pytest.mark.parametrize(
    ("op", "found", "why"),
    [
        ("sum", 24, ["  with different sizes"]),
        (
            "sum",
            32,
            [
                "  rank 0 found a message of 32 bytes of collective #0 from rank 1 "
                "where it expected a message of 24 bytes of collective #0"
            ],
        ),
        ("max", 24, []),
        ("max", 32, []),
    ],
)
def test_only_equal_calls_are_explained_by_what_was_found(
    op: str, found: int, why: list[str]
) -> None:
    """Rank 0, which calls with the op sum, expects 24 bytes from rank 1."""
    calls = [(0, fingerprint("reduce_scatter", torch.float32, o, 0), 6, SITE) for o in ("sum", op)]
    seen = Survey([State(RankRecord(1, 1, 0, 0, 0, 0.0), None, {0: call}) for call in calls])
    failure = Failure(FailureKind.MISMATCH, 1, 0, (0, 1, 24), (0, 1, found))
    assert _disagreement(failure, seen, ()).splitlines()[3:] == why
