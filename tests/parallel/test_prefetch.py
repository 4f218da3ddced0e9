"""The prefetch policy looks ahead in order, within its bound, and not past the unit in use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringdp.parallel import gathering
from ringdp.parallel.accounting.dry_run import Event, _Unit, iteration, peaks
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.prefetch import ahead, forecast, position_of
from ringdp.parallel.reducing import Reducing, _Reduction, _Turn
from ringdp.parallel.state import State

SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=8)


def alone(units):
    """Every unit in a module of its own."""
    return [[i] for i in range(units)]


def test_the_first_forecast_is_a_forward_and_its_backward():
    assert forecast(alone(1)) == (0, 0)
    assert forecast(alone(4)) == (0, 1, 2, 3, 0, 3, 2, 1)
    assert forecast([[0, 1], [2], [3, 4]]) == (0, 1, 2, 3, 4, 0, 1, 3, 4, 2)


def test_a_use_is_searched_forwards_only():
    order = forecast(alone(4))
    assert position_of(3, order, after=-1) == 3
    assert position_of(3, order, after=3) == 5
    assert position_of(3, order, after=5) is None
    assert position_of(9, order, after=-1) is None


def look(order, position, *, in_use=None, sharded, in_flight=0, sizes, limit):
    return ahead(
        order,
        position,
        in_use=in_use,
        is_sharded=sharded.__contains__,
        in_flight=in_flight,
        sizes=sizes,
        limit=limit,
    )


def test_prefetching_stops_at_the_bound_and_at_the_unit_in_use():
    sizes, sharded = [0, 5, 5, 5], {1, 2, 3}
    assert look(forecast(alone(4)), 0, sharded=sharded, sizes=sizes, limit=10) == [1, 2]
    assert look(forecast(alone(4)), 0, sharded=sharded, in_flight=5, sizes=sizes, limit=10) == [1]
    assert look(forecast(alone(4)), 0, sharded=sharded, sizes=sizes, limit=4) == []
    # Unit 3 will be freed before its backward, so gathering beyond it would be undone.
    assert look(forecast(alone(4)), 3, in_use=3, sharded={1, 2}, sizes=sizes, limit=99) == []


def test_a_unit_that_does_not_fit_is_not_overtaken():
    assert look((0, 1, 2), 0, sharded={1, 2}, sizes=[0, 9, 1], limit=5) == []


@given(SIZES, st.integers(0, 300), st.data())
def test_the_bound_holds_and_nothing_is_gathered_twice(sizes, limit, data):
    units = range(len(sizes))
    order = tuple(data.draw(st.lists(st.sampled_from(units), min_size=1, max_size=20)))
    sharded = data.draw(st.sets(st.sampled_from(units)))
    in_flight = data.draw(st.integers(0, 300))
    position = data.draw(st.integers(0, len(order) - 1))
    found = look(order, position, sharded=sharded, in_flight=in_flight, sizes=sizes, limit=limit)
    assert not found or in_flight + sum(sizes[u] for u in found) <= limit
    assert len(found) == len(set(found))
    assert set(found) <= sharded & set(order[position + 1 :])


def test_without_freeing_there_is_one_look_ahead(monkeypatch):
    """The first call gathers everything; looking again at each use would be quadratic in the number
    of units."""
    looks = []
    monkeypatch.setattr(gathering, "ahead", lambda *a, **k: looks.append(a) or ahead(*a, **k))
    events = iteration([0] * 50, alone(50), 0, freed=False)
    assert [unit for what, unit in events if what == "gather"] == list(range(50))
    assert len(looks) == 1


def test_units_are_still_foreseen_if_the_roots_backward_comes_late():
    """As in the first iteration of an nn.Sequential: the root returns the last unit's tensor."""
    events: list[Event] = []
    units = [_Unit(i, 1, events, freed=i > 0) for i in range(4)]
    gathering = Gathering(units, alone(4), None, 1, None)
    for unit in range(4):
        gathering.use(unit)
        gathering.done_with(unit, free=True)
    for unit in (3, 0, 2):
        gathering.use(unit)
    assert events[-1] == Event("gather", 1)


def test_a_gradient_starts_a_deferred_gather_only_once_the_reduction_is_over():
    """Until then it does not wait for it."""
    events: list[Event] = []
    units = [_Unit(i, 8, events, freed=i > 0) for i in range(3)]
    bucket, over, waits = torch.empty(2), [False], []
    reduced: Any = SimpleNamespace(gradients=SimpleNamespace(bucket=bucket, reduced=bucket))
    work: Any = SimpleNamespace(is_completed=lambda: over[0], wait=lambda: waits.append(1))
    reducing = Reducing(None, None)
    reducing._pending.append(_Reduction(_Turn(reduced, False, False, []), bucket, bucket, work))
    gathering = Gathering(units, alone(3), None, 8, reducing)
    gathering.use(0)
    gathering.prefetch_deferred(wait=False)
    assert events == [Event("gather", 0)]
    assert not waits
    over[0] = True
    gathering.prefetch_deferred(wait=False)
    assert events == [Event("gather", 0), Event("gather", 1)]


class Dropped(_Unit):
    """One that can be resharded before it is used."""

    static = False

    def drop(self) -> None:
        self.state = State.SHARDED


def test_what_an_iteration_has_left_in_flight_takes_no_room_in_the_next():
    events: list[Event] = []
    units = [Dropped(i, 8, events, freed=i > 0) for i in range(3)]
    gathering = Gathering(units, alone(3), None, 8, None)
    for _ in range(2):  # a forward without a backward
        gathering.begin(foreseen=True, trains=True)
        gathering.use(0)
        assert events[-1] == Event("gather", 1)
        events.clear()


def test_an_iteration_that_leaves_the_order_of_the_last_one_is_not_foreseen():
    events: list[Event] = []
    units = [Dropped(i, 8, events, freed=i > 0) for i in range(4)]
    gathering = Gathering(units, alone(4), None, 8, None)
    for unit in (0, 1, 3):
        gathering.use(unit)
    gathering.end(learn=True)
    for uses, foreseen in (((0, 1), True), ((0, 2, 1), False)):
        gathering.begin(foreseen=True, trains=True)
        for unit in uses:
            gathering.use(unit)
        assert (units[3].state is not State.SHARDED) == foreseen
        gathering.end(learn=False)


def test_what_was_deferred_at_the_end_of_an_iteration_is_not_gathered_after_it():
    """The next one may use other units."""
    events: list[Event] = []
    units = [Dropped(i, 8, events, freed=i > 0) for i in range(3)]
    busy: Any = SimpleNamespace(under_way=lambda: 8, finish=lambda: None)
    gathering = Gathering(units, alone(3), None, 8, busy)
    gathering.use(0)
    gathering.end(learn=False)
    busy.under_way = lambda: 0
    gathering.begin(foreseen=True, trains=True)
    gathering.prefetch_deferred(wait=True)
    assert [event for event in events if event.what == "gather"] == [Event("gather", 0)]


def gathered_peak(sizes, groups, limit):
    return peaks(iteration(sizes, groups, limit, freed=True), sizes, sizes).gathered


@given(st.integers(1, 50), st.integers(1, 50), st.integers(2, 9))
def test_equal_units_peak_at_the_root_and_two(root, size, units):
    assert gathered_peak([root] + [size] * units, alone(units + 1), limit=size) == root + 2 * size
    assert gathered_peak([root] + [size] * units, alone(units + 1), limit=0) == root + size


@pytest.mark.parametrize(("limit", "twice"), [(4, [1, 2, 3]), (5, [1, 2]), (15, [])])
@pytest.mark.parametrize("pieces", [[0, 0, 0, 0], [9, 1, 2, 3]])
def test_units_that_would_be_gathered_again_at_once_stay(limit, twice, pieces):
    events = iteration([9, 5, 5, 5], alone(4), limit, freed=True, pieces=pieces)
    gathers = [event for event in events if event.what.startswith("gather")]
    first, second = gathers[:4], gathers[4:]
    assert first == [("gather", unit) for unit in range(4)]
    assert second == [
        ("gather_near" if any(pieces) else "gather", unit) for unit in reversed(twice)
    ]


@given(SIZES, st.integers(0, 300))
def test_units_are_gathered_when_they_are_used(sizes, limit):
    held: set[int] = set()
    used = []
    for what, which in iteration(sizes, alone(len(sizes)), limit, freed=True):
        if what == "gather":
            assert which not in held
            held.add(which)
        elif what == "free":
            held.remove(which)
        elif what == "use":
            assert which in held
            used.append(which)
    assert tuple(used) == forecast(alone(len(sizes)))
    assert held == {0}


@given(SIZES, st.integers(0, 300))
def test_the_peak_lies_between_its_bounds(sizes, limit):
    root, inner = sizes[0], sizes[1:]
    peak = gathered_peak(sizes, alone(len(sizes)), limit)
    largest = max(inner, default=0)
    assert root + largest <= peak <= root + min(sum(inner), largest + limit)
    assert peak <= gathered_peak(sizes, alone(len(sizes)), limit=sum(sizes)) == sum(sizes)
