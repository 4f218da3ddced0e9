"""Every algorithm meets its contract for every n, and takes the rounds that its docstring
states."""

from __future__ import annotations

import tracemalloc

import pytest

from ringdp.errors import ScheduleError, UsageError
from ringdp.schedule import (
    Schedule,
    contract,
    fifo_depth,
    fuse,
    project,
    schedule,
    verify,
)
from ringdp.schedule.algorithms.ring import hierarchical_all_reduce, ring_all_reduce
from tests.schedule.test_program import by_name, programs, sends

SIZES = [*range(1, 18), 32, 64]


@by_name
def test_schedules_meet_their_contracts(algorithm):
    for n in SIZES:
        verify(schedule(algorithm.collective, algorithm.name, n), algorithm.collective)


@by_name
def test_rooted_schedules_meet_the_contract_of_every_root(algorithm):
    """Shards stay in rank order for every root, as the root's contract says."""
    if algorithm.collective not in ("broadcast", "reduce", "gather", "scatter"):
        return
    for n in SIZES[:9]:
        for root in range(n):
            plan = schedule(algorithm.collective, algorithm.name, n, root)
            verify(plan, contract(algorithm.collective, n, plan.chunks, root))
            if root:
                with pytest.raises(ScheduleError):
                    verify(plan, algorithm.collective)


@pytest.mark.parametrize("n", range(1, 18))
def test_a_direct_reduce_adds_in_rank_order_for_every_root(n):
    for root in range(n):
        plan = schedule("reduce", "direct", n, root)
        parts = {0: root} | {1 + r: r for r in range(n) if r != root}
        local = [t for r in plan.rounds for t in r if t.src == t.dst and t.reduce]
        order = [parts[t.read] for t in local]
        start = parts[local[0].write] if local else 0
        assert sorted([start, *order[:1]]) + order[1:] == list(range(n))


@by_name
def test_plain_programs_need_fifo_depth_1_and_fused_ones_at_most_4(algorithm):
    for n in SIZES[:17]:
        plan = schedule(algorithm.collective, algorithm.name, n)
        plain, fused = programs(plan, algorithm.collective)
        assert fifo_depth(plain) == 1
        assert fifo_depth(fused) <= 4
        assert all(len(f.rows) <= len(p.rows) for f, p in zip(fused, plain, strict=True))


@pytest.mark.parametrize("n", range(1, 18))
def test_all_gather_is_reduce_scatter_transposed(n):
    for name in ("ring", "two_way_ring", "halving"):
        scatter = schedule("reduce_scatter", name, n)
        assert scatter.transpose() == schedule("all_gather", name, n)
        verify(scatter.transpose(), "all_gather")
        assert scatter.transpose().transpose() == scatter
    verify(schedule("broadcast", "binomial", n).transpose(), "reduce")


@pytest.mark.parametrize("n", range(2, 18))
def test_the_fused_ring_has_the_rows_of_nccls_ring(n):
    plan = schedule("all_reduce", "ring", n)
    for rank in range(n):
        assert [row.name for row in fuse(project(plan, rank))] == [
            "send",
            *["recv_reduce_send"] * (n - 2),
            "recv_reduce_copy_send",
            *["recv_copy_send"] * (n - 2),
            "recv",
        ]


@pytest.mark.parametrize(("local", "nodes"), [(1, 6), (2, 3), (3, 2), (6, 1), (4, 4), (8, 8)])
def test_hierarchical_schedules_of_any_shape(local, nodes):
    plan = schedule("all_reduce", f"hierarchical:{local}", local * nodes)
    verify(plan, "all_reduce")
    assert plan == hierarchical_all_reduce(local * nodes, local)
    crossing = [
        t for r in plan.rounds for t in r if t.src // local != t.dst // local
    ]  # per rank 2(nodes-1)/nodes of 1/local of the buffer
    assert len(crossing) == local * nodes * 2 * (nodes - 1)


def test_halving_takes_log2_n_rounds():
    for n in SIZES:
        assert len(schedule("reduce_scatter", "halving", n).rounds) == (n - 1).bit_length()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", "ring", 0), "at least 1"),
        (("all_reduce", "rign", 4), "ring, two_way_ring"),
        (("allreduce", "ring", 4), "all_reduce, reduce_scatter"),
        (("all_reduce", "hierarchical:3", 4), "divides 4"),
        (("all_reduce", "hierarchical:x", 4), "divides 4"),
        (("all_reduce", f"hierarchical:{'9' * 5000}", 4), "divides 4"),
    ],
)
def test_unknown_names_and_sizes_are_refused_with_the_choices(arguments, message):
    with pytest.raises(UsageError, match=message):
        schedule(*arguments)


def test_verify_refuses_an_unknown_collective():
    with pytest.raises(UsageError, match="no collective 'nonsense'; there are all_reduce"):
        verify(ring_all_reduce(1), "nonsense")


def test_combinators_refuse_mismatched_shapes():
    ring = ring_all_reduce(4)
    with pytest.raises(ScheduleError, match="4 x 4 and 3 x 3"):
        ring.then(ring_all_reduce(3))
    with pytest.raises(ScheduleError, match="same ranks"):
        ring.beside(ring_all_reduce(3))
    with pytest.raises(ScheduleError, match="4 distinct ranks"):
        ring.embed([0, 1, 2, 2], range(4))
    with pytest.raises(ScheduleError, match=r"in 0\.\.3"):
        ring.embed(range(4), [0, 1, 2, 4])
    with pytest.raises(ScheduleError, match="equally many"):
        ring.embed(range(4), [[0, 1], [2, 3], [4, 5], [6]], into=(4, 8))
    with pytest.raises(ScheduleError, match="one shape"):
        Schedule.together([ring, ring_all_reduce(3)])
    with pytest.raises(ScheduleError, match="multiple of 3"):
        contract("reduce_scatter", 3, 4)
    with pytest.raises(ScheduleError, match="needs 9 chunks: 3"):
        contract("all_to_all_v", 3, 3)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_combinators_preserve_correctness(n):
    ring = ring_all_reduce(n)
    verify(ring.beside(ring), "all_reduce")
    backwards = range(n)[::-1]
    verify(ring.embed(backwards, backwards), "all_reduce")
    cut = [range(3 * c, 3 * c + 3) for c in range(n)]
    verify(ring.embed(range(n), cut, into=(n, 3 * n)), "all_reduce")
    scattered = schedule("reduce_scatter", "direct", n).beside(
        schedule("reduce_scatter", "direct", n)
    )  # scratch of both must not collide
    both = [*range(0, 2 * n, 2), *range(1, 2 * n, 2)]
    verify(scattered.embed(range(n), both), "reduce_scatter")


def test_messages_per_rank_are_within_the_documented_bounds():
    for n in SIZES:
        for collective, name, most in (
            ("reduce_scatter", "halving", n - 1),
            ("all_reduce", "tree", 2 * 2),
        ):
            plan = schedule(collective, name, n)
            for rank in range(n):
                assert sends(project(plan, rank)) <= most


def test_the_contract_of_all_to_all_v_grows_with_its_n_squared_chunks():
    """With its n^3 slots, 64 ranks took 5 s and 140 MB each."""
    n = 32
    tracemalloc.start()
    try:
        contract("all_to_all_v", n, n * n)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1000 * n * n  # bytes; the tables of all slots took 19 MB
