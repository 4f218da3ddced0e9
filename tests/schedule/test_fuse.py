"""Fusing preserves results, for random schedules with several messages between a pair of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringdp.errors import ScheduleError
from ringdp.schedule import Program, Schedule, Transfer, fifo_depth, fuse, project
from ringdp.schedule.ir import Round
from ringdp.schedule.program import NONE, STORE
from ringdp.transport.simulator import simulate

Slot = tuple[int, int]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Random schedules that keep the rules of a round; they need not compute anything useful."""
    n, chunks, scratch = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    ranks, places = st.integers(0, n - 1), st.integers(0, chunks + scratch - 1)
    defined = {(r, c) for r in range(n) for c in range(chunks)}
    rounds = []
    for _ in range(draw(st.integers(1, 6))):
        read: set[Slot] = set()
        written: dict[Slot, bool] = {}
        transfers = []
        for _ in range(draw(st.integers(1, 8))):
            t = Transfer(draw(ranks), draw(ranks), draw(places), draw(places), draw(st.booleans()))
            source, target = (t.src, t.read), (t.dst, t.write)
            if (
                source not in defined
                or (t.reduce and target not in defined)
                or source in written
                or target in read
                or source == target
                or (target in written and not (t.reduce and written[target]))
            ):
                continue
            read.add(source)
            written[target] = t.reduce
            transfers.append(t)
        defined |= written.keys()
        rounds.append(tuple(transfers))
    return Schedule(n, chunks, tuple(rounds))


def several_reduces(transfers: Round) -> bool:
    """Whether a slot is reduced into more than once, whose order can delay a receive."""
    return len({(t.dst, t.write) for t in transfers}) < len(transfers)


def results(programs: list[Program], depth: int) -> list[list[int]]:
    buffers = [
        torch.tensor([3**c * 1000**p.rank for c in range(p.chunks)], dtype=torch.int64)
        for p in programs
    ]
    simulate(programs, buffers, "sum", depth=depth)
    return [b.tolist() for b in buffers]


@settings(max_examples=300)
@given(schedules(), st.data())
def test_fused_programs_equal_plain_ones_at_the_predicted_depth(plan, data):
    plain = [project(plan, r) for r in range(plan.ranks)]
    depth = fifo_depth(plain)
    assert depth == 1 or any(several_reduces(r) for r in plan.rounds)  # see `project`
    expected = results(plain, depth)
    live = [data.draw(st.sets(st.integers(0, plan.chunks - 1))) for _ in plain]
    fused = [fuse(p, keep) for p, keep in zip(plain, live, strict=True)]
    depth = fifo_depth(fused)
    for keep, mine, theirs in zip(live, results(fused, depth), expected, strict=True):
        assert all(mine[c] == theirs[c] for c in keep)
    if depth > 1:
        with pytest.raises(ScheduleError, match="stall"):
            results(fused, depth - 1)
    everything = [fuse(p) for p in plain]
    # a transport need not add up what no row keeps
    assert all(row.send_peer != NONE or row.flags & STORE for p in fused for row in p)
    assert results(everything, fifo_depth(everything)) == expected
    assert all(len(f.rows) <= len(p.rows) for f, p in zip(everything, plain, strict=True))


def test_receives_from_one_rank_keep_their_order():
    """What is received into scratch is added only after the second message; fusing must not move
    it."""
    arrive = (Transfer(0, 1, 0, 2, False), Transfer(0, 1, 1, 1, False))
    plan = Schedule(2, 2, (arrive, (Transfer(1, 1, 2, 0, True),)))
    plain = [project(plan, r) for r in range(2)]
    fused = [fuse(p) for p in plain]
    assert results(fused, 2) == results(plain, 2) == [[1, 3], [1001, 3]]


def test_a_local_copy_and_a_send_of_it_stay_two_rows():
    """Only what a row receives is also sent by it."""
    plan = Schedule(2, 2, ((Transfer(0, 0, 0, 1, False),), (Transfer(0, 1, 1, 0, False),)))
    assert [row.name for row in fuse(project(plan, 0))] == ["copy", "send"]
