"""The predicted timeline of a step: it sends the traffic formula's bytes, and equals timelines
worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringdp.cli.plan.step import Step, predict
from ringdp.parallel.accounting.formula import Sharding, traffic
from ringdp.parallel.accounting.memory import Widths
from ringdp.parallel.layout import layout
from ringdp.parallel.stages import STAGES

FLOAT32 = Widths(4, 4, 4)
FROZEN = Widths(4, 4, 4, trainable=False)
BF16 = Widths(4, 2, 2, apart=True, own=False)
RANKS = 4


def run(
    sizes,
    stage,
    widths,
    *,
    cost,
    forward,
    wires=None,
    flatten=None,
    limit=None,
    beside=True,
    replicas=1,
):
    units = layout([(str(i), [("w", s)]) for i, s in enumerate(sizes)], RANKS, replicas)
    most = max(
        (w.compute * u.padded for u, w in zip(units[1:], widths[1:], strict=True)), default=0
    )
    groups = [[i] for i in range(len(sizes))]
    limit = most if limit is None else limit
    given = Sharding(units, widths, groups, STAGES[stage], limit, replicas=replicas)
    return given, predict(
        given,
        cost=cost,
        wires=wires,
        forward=forward,
        flatten=flatten or [0.0] * len(sizes),
        optimizer=0.0,
        beside=beside,
    )


def sent(collective: str, size: int, _part: str = "") -> float:
    return (2 if collective == "all_reduce" else 1) * (RANKS - 1) * size // RANKS


def one(_collective: str, size: int, _part: str) -> float:
    return 1.0 if size else 0.0


def ten(collective: str, size: int, _part: str) -> float:
    return 10.0 if size and collective == "reduce_scatter" else 0.0


@given(
    st.lists(
        st.tuples(st.integers(0, 999), st.sampled_from([FLOAT32, FROZEN, BF16])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([0, 1, 2, 3]),
    st.integers(0, 5000),
)
def test_the_timeline_sends_the_bytes_of_the_traffic_formula(units, stage, limit):
    sizes, widths = zip(*units, strict=True)
    given, step = run(sizes, stage, widths, cost=sent, forward=[1.0] * len(sizes), limit=limit)
    assert step.communication == traffic(given)
    assert 0 <= step.exposed <= step.communication
    assert step.compute == 3 * len(sizes)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=6), st.sampled_from([1, 2, 3]))
def test_as_many_replicas_as_each_has_ranks_send_the_bytes_of_the_formula(sizes, stage):
    widths, forward = [BF16] * len(sizes), [1.0] * len(sizes)
    given, step = run(sizes, stage, widths, cost=sent, forward=forward, limit=0, replicas=RANKS)
    assert step.communication == traffic(given)
    shards = sum(w.reduce * u.shard for u, w in given.each)
    assert traffic(given) - traffic(given._replace(replicas=1)) == sent("all_reduce", shards)


# A root without parameters, and two equal units A and B. Every collective takes 1, a unit's forward
# 1, its backward 2.
#     stage 0      forward 0-2, B's backward 2-4, reduced 4-5; A's 4-6, reduced 6-7
#     stages 1, 2  A gathered 0-1, B 1-2 during A's forward; then as stage 0
#     stage 3      as 1, but A is freed after its forward and gathered again during B's backward
BY_HAND = {
    0: Step(compute=6, communication=2, exposed=1, optimizer=0),
    1: Step(compute=6, communication=4, exposed=2, optimizer=0),
    2: Step(compute=6, communication=4, exposed=2, optimizer=0),
    3: Step(compute=6, communication=5, exposed=2, optimizer=0),
}


@pytest.mark.parametrize("stage", BY_HAND)
def test_timelines_equal_those_worked_out_by_hand(stage):
    _, step = run([0, 64, 64], stage, [FROZEN, FLOAT32, FLOAT32], cost=one, forward=[0, 1, 1])
    assert step == BY_HAND[stage]
    assert step.total == step.compute + step.exposed
    assert step.hidden == step.communication - step.exposed


def test_with_one_bucket_a_reduction_waits_for_the_previous_one():
    """Reductions of 10 after backwards of 2: the second starts when the first has finished."""

    both = [
        run([0, 64, 64, 64], stage, [FROZEN] + 3 * [FLOAT32], cost=ten, forward=[0, 1, 1, 1])[1]
        for stage in (1, 2)
    ]
    # The third unit's backward ends at 5; the wire is busy until 35 in either case. In stage 2 the
    # second unit's backward waits from 7 to 15, the first's, 15-17, from 17 to 25.
    assert [s.compute + s.exposed for s in both] == [35, 35]
    assert [s.exposed for s in both] == [26, 26]


def test_a_bucket_is_filled_while_the_previous_one_is_reduced():
    """As above with 0.5 more per unit: the third is reduced 5.5-15.5, the second, whose bucket is
    full at 8, 15.5-25.5, and the first, full at 18, 25.5-35.5."""

    sizes, forward, flatten = [0, 64, 64, 64], [0, 1, 1, 1], [0, 0.5, 0.5, 0.5]
    widths = [FROZEN] + 3 * [FLOAT32]
    _, step = run(sizes, 2, widths, cost=ten, forward=forward, flatten=flatten)
    assert step == Step(compute=10.5, communication=30, exposed=25, optimizer=0)


def test_each_network_carries_one_collective_at_a_time():
    """As stages 1, 2 by hand, then an all_reduce of 10: B's is 6-16. A's reduce_scatter, 7-8 if the
    wire is another, else 16-17, is before A's."""

    def cost(collective: str, size: int, part: str) -> float:
        return 10 if part == "replicas" else one(collective, size, part)

    sizes, widths = [0, 64, 64], [FROZEN, FLOAT32, FLOAT32]
    for wires, total in ((None, 27), ({"replicas": "between nodes"}, 26)):
        _, step = run(sizes, 1, widths, cost=cost, wires=wires, forward=[0, 1, 1], replicas=2)
        assert step.total == total


def test_without_compute_nothing_is_hidden():
    _, step = run([64, 64, 64], 3, [FLOAT32] * 3, cost=sent, forward=[0.0] * 3)
    assert step.hidden == 0
    assert step.total == step.communication > 0


def test_flattening_is_compute_before_the_reduction():
    """As stage 0 by hand with 0.5 more per unit: B is reduced 4.5-5.5, A 7-8."""

    sizes, widths = [0, 64, 64], [FROZEN, FLOAT32, FLOAT32]
    _, step = run(sizes, 0, widths, cost=one, forward=[0, 1, 1], flatten=[9.0, 0.5, 0.5])
    assert step == Step(compute=7, communication=2, exposed=1, optimizer=0)


@given(st.sampled_from([0, 1, 2, 3]), st.floats(0, 10))
def test_without_spare_cores_no_communication_is_hidden(stage, forward):
    sizes, widths = [5, 64, 80], [FLOAT32] * 3
    both = [
        run(sizes, stage, widths, cost=sent, forward=[forward] * 3, beside=beside)[1]
        for beside in (True, False)
    ]
    assert both[1].hidden == pytest.approx(0, abs=1e-6)
    assert both[1].communication == both[0].communication
    assert both[1].total >= both[0].total
