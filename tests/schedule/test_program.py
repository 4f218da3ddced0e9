"""Plain and fused programs do what their schedule says, through FIFOs of the predicted depth."""

from __future__ import annotations

import pytest
import torch

from ringdp.errors import ScheduleError, UsageError
from ringdp.schedule import (
    ALGORITHMS,
    Program,
    Schedule,
    Transfer,
    contract,
    fifo_depth,
    fuse,
    project,
    schedule,
)
from ringdp.schedule.liveness import fits
from ringdp.schedule.program import NONE
from ringdp.transport.simulator import simulate

by_name = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.collective}-{a.name}")


def buffers(n: int, elements: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(elements, generator=generator) for _ in range(n)]


def programs(plan: Schedule, collective: str) -> tuple[list[Program], list[Program]]:
    plain = [project(plan, r) for r in range(plan.ranks)]
    promise = contract(collective, plan.ranks, plan.chunks)
    return plain, [fuse(p, promise.kept(p.rank)) for p in plain]


def sends(program: Program) -> int:
    """How many one-chunk messages its rank sends."""
    return sum(row.send_peer != NONE for row in program)


@by_name
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_every_algorithm_fused_equals_plain_at_the_predicted_depth(algorithm, n):
    plan = schedule(algorithm.collective, algorithm.name, n)
    elements = 3 * plan.chunks
    plain, fused = programs(plan, algorithm.collective)
    results = []
    for kind in (plain, fused):
        depth = fifo_depth(kind)
        assert fits(kind, depth)
        data = buffers(n, elements)
        simulate(kind, data, depth=depth)
        results.append(data)
        if depth > 1:
            assert not fits(kind, depth - 1)
            with pytest.raises(ScheduleError, match="stall"):
                simulate(kind, buffers(n, elements), depth=depth - 1)
    for rank, chunk in contract(algorithm.collective, n, plan.chunks).after:
        piece = slice(3 * chunk, 3 * chunk + 3)
        assert torch.equal(results[0][rank][piece], results[1][rank][piece])


def test_the_simulator_refuses_missing_programs_and_uneven_buffers():
    plain, _ = programs(schedule("all_reduce", "ring", 4), "all_reduce")
    missing = r"{} programs over 4 ranks and {} buffers; allowed: one of each for every rank"
    for these, those in ((plain[:3], 3), (plain, 3), (plain[:3], 4)):
        with pytest.raises(UsageError, match=missing.format(len(these), those)):
            simulate(these, buffers(those, 8))
    uneven = [*buffers(3, 8), torch.zeros(5)]
    with pytest.raises(UsageError, match=r"buffers of \[8, 8, 8, 5\] elements; allowed: one len"):
        simulate(plain, uneven)


@by_name
def test_programs_send_exactly_the_schedules_transfers(algorithm):
    for n in range(1, 9):
        plan = schedule(algorithm.collective, algorithm.name, n)
        for rank, (plain, fused) in enumerate(
            zip(*programs(plan, algorithm.collective), strict=True)
        ):
            leaving = sum(t.src == rank != t.dst for r in plan.rounds for t in r)
            assert sends(fused) == sends(plain) == leaving


def test_fusing_keeps_the_order_of_sends_to_one_peer():
    """Rank 1 forwards chunk 1, then what it has received into chunk 0. If `fuse` hoisted the second
    send into the receive, it would overtake the first."""
    plan = Schedule(
        2,
        2,
        (
            (Transfer(0, 1, 0, 0, False),),
            (Transfer(1, 0, 1, 0, False),),
            (Transfer(1, 0, 0, 1, False),),
        ),
    )
    plain = [project(plan, r) for r in range(2)]
    fused = [fuse(p) for p in plain]
    assert [row.name for row in fused[1]] == ["recv", "send", "send"]
    before, after = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], []
    for kind in (plain, fused):
        data = [b.clone() for b in before]
        simulate(kind, data, depth=fifo_depth(kind))
        after.append(torch.stack(data))
    assert torch.equal(after[0], after[1])
    assert after[0].tolist() == [[4.0, 1.0], [1.0, 4.0]]


@pytest.mark.parametrize("rank", [-1, 4])
def test_projecting_to_a_rank_out_of_range_is_refused(rank):
    with pytest.raises(UsageError, match=f"rank is {rank}; allowed: 0 to 3"):
        project(schedule("all_reduce", "ring", 4), rank)


@pytest.mark.parametrize(("missing", "sent"), [(1, 1), (3, 0)])
def test_fifo_depth_names_a_receive_without_its_send(missing: int, sent: int):
    plan = schedule("all_reduce", "ring", 3)
    parts = [project(plan, r) for r in range(3)]
    parts[0] = parts[0].with_rows(list(parts[0])[missing:])
    message = f"rank 0 sends {sent} messages to rank 1, which receives 2"
    with pytest.raises(ScheduleError, match=message):
        fifo_depth(parts)


def test_fifo_depth_names_a_send_without_its_receive():
    parts = [project(schedule("all_reduce", "ring", 3), r) for r in range(3)]
    parts[1] = parts[1].with_rows(row for row in parts[1] if row.recv_peer == NONE)
    with pytest.raises(ScheduleError, match="rank 0 sends 2 messages to rank 1, which receives 0"):
        fifo_depth(parts)


@pytest.mark.parametrize("messages", range(1, 6))
def test_fifo_depth_is_the_least(messages: int):
    """Rank 1 takes rank 0's messages after one of rank 2, which waits for what rank 0 sends after
    them."""
    first = [(Transfer(0, 1, 0, c, False),) for c in range(messages)]
    rounds = (*first, (Transfer(0, 2, 0, 0, False),), (Transfer(2, 1, 0, messages, False),))
    parts = [project(Schedule(3, messages + 1, rounds), r) for r in range(3)]
    rows = list(parts[1])
    parts[1] = parts[1].with_rows([rows[-1], *rows[:-1]])
    assert fifo_depth(parts) == messages


def test_fifo_depth_reports_cycles():
    parts = [project(schedule("all_gather", "ring", 2), r) for r in range(2)]
    assert fifo_depth(parts) == 1
    with pytest.raises(ScheduleError, match="in a cycle at any FIFO depth"):
        fifo_depth([p.with_rows(list(p)[::-1]) for p in parts])


def test_fusing_drops_stores_that_are_never_read():
    plan = schedule("reduce_scatter", "ring", 4)
    names = [row.name for row in fuse(project(plan, 0), {0})]
    assert names == ["send", "recv_reduce_send", "recv_reduce_send", "recv_reduce_copy"]
    assert contract("reduce_scatter", 4, 4).kept(0) == [0]
    kept = [row.name for row in fuse(project(plan, 0))]
    assert kept[1] == "recv_reduce_copy_send"


@pytest.mark.parametrize(
    ("collective", "algorithm", "names"),
    [
        ("reduce", "direct", ["recv_reduce_copy"] * 3),
        ("all_to_all", "direct", ["send"] * 3 + ["recv"] * 3),
        ("all_to_all", "pairwise", ["send"] * 3 + ["recv"] * 3),
    ],
)
def test_fusing_removes_scratch_that_is_read_once(collective, algorithm, names):
    fused = fuse(project(schedule(collective, algorithm, 4), 0))
    assert [row.name for row in fused] == names
    assert fused.scratch == 0


def test_fusing_removes_the_first_scratch_chunk():
    received, added = Transfer(0, 1, 0, 1, False), Transfer(1, 1, 1, 0, True)
    fused = fuse(project(Schedule(2, 1, ((received,), (added,))), 1))
    assert [row.name for row in fused] == ["recv_reduce_copy"]
    assert fused.scratch == 0


def test_a_rank_sends_before_it_receives_in_a_round():
    """Otherwise a round would be a chain in which each rank waits for the one before."""
    for rank in range(4):
        names = [row.name for row in project(schedule("reduce_scatter", "ring", 4), rank)]
        assert names == ["send", "recv_reduce_copy"] * 3


def test_reduces_into_one_slot_keep_the_order_listed():
    """Although rank 0's is its second message: floats added in another order have other bits."""
    t = Transfer
    plan = Schedule(3, 2, ((t(0, 2, 1, 1, True), t(0, 2, 0, 0, True), t(1, 2, 0, 0, True)),))
    assert [row.recv_peer for row in project(plan, 2) if row.dst_chunk == 0] == [0, 1]


def test_alike_lists_chunks_that_must_have_equal_lengths():
    of_ours = [
        (a.collective, project(schedule(a.collective, a.name, 4), 0).alike) for a in ALGORITHMS
    ]
    assert {collective for collective, found in of_ours if found} == {"all_to_all"}
    t = Transfer
    rounds = ((t(0, 1, 0, 3, False),), (t(1, 1, 3, 4, False),), (t(1, 0, 4, 2, True),))
    # one is copied into the other through scratch
    assert project(Schedule(2, 3, rounds), 0).alike == ((0, 2),)
    rounds = ((t(0, 1, 0, 3, False),), (t(0, 1, 1, 3, True),))
    # both are in the same scratch slot
    assert project(Schedule(2, 3, rounds), 0).alike == ((1, 0),)
