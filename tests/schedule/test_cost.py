"""Closed-form prices equal exact counts; `choose` takes the cheapest algorithm, `fit` recovers α β
γ."""

from __future__ import annotations

from fractions import Fraction

import pytest

from ringdp.errors import UsageError
from ringdp.schedule import ALGORITHMS, schedule
from ringdp.schedule.cost import (
    CLOSED,
    LEAST_CACHE,
    Machine,
    Price,
    _ends,
    choose,
    closed,
    fit,
    price,
    seconds,
)
from tests.schedule.test_program import by_name


@by_name
def test_closed_forms_equal_exact_counts(algorithm):
    for n in [*range(1, 33), 48, 64]:
        counted = price(schedule(algorithm.collective, algorithm.name, n))
        assert closed(algorithm.collective, algorithm.name, n) == counted, n


def test_every_algorithm_has_a_closed_form():
    assert set(CLOSED) == {(a.collective, a.name) for a in ALGORITHMS}


def test_ring_all_reduce_costs_the_published_formula():
    """Patarasuk & Yuan 2009: 2(n-1)α + 2(n-1)/n Sβ + (n-1)/n Sγ."""
    for n in (2, 7, 65536):
        assert closed("all_reduce", "ring", n) == Price(
            2 * (n - 1), Fraction(2 * (n - 1), n), Fraction(n - 1, n), Fraction(2 * (n - 1))
        )


def test_choose_returns_the_cheapest_algorithm():
    machine = Machine(alpha=1e-5, beta=1e-9, gamma=1e-10)
    assert choose("all_reduce", 64, 8, machine) == "doubling"
    assert choose("all_reduce", 64, 1 << 30, machine) in ("halving", "direct", "ring")
    for n in (2, 3, 64, 1000, 65536):
        for size in (0, 1 << 10, 1 << 30):
            best = choose("all_reduce", n, size, machine)
            least = min(
                seconds(closed("all_reduce", a.name, n), machine, size)
                for a in ALGORITHMS
                if a.collective == "all_reduce"
            )
            assert seconds(closed("all_reduce", best, n), machine, size) == least


def test_halving_moves_a_rings_bytes_in_fewer_messages():
    """For powers of two from 4 ranks on, as docs/1 says."""
    assert closed("all_reduce", "halving", 2) == closed("all_reduce", "ring", 2)
    for n in (4, 8, 16, 1024, 65536):
        halving, ring = (closed("all_reduce", name, n) for name in ("halving", "ring"))
        assert halving[1:3] == ring[1:3]
        assert halving.messages < ring.messages


def test_fit_recovers_the_machine_from_its_times():
    machine = Machine(alpha=3e-6, beta=2e-10, gamma=5e-11, bus=4e-11, call=1e-6)
    rows = [
        (p := closed("all_reduce", name, n), size, seconds(p, machine, size))
        for name in ("ring", "doubling", "tree", "halving")
        for n in (2, 3, 5, 8)
        for size in (1 << 8, 1 << 14, 1 << 20, 1 << 24)
    ]
    *found, caches = fit(rows)
    assert found == pytest.approx(machine[:-1], rel=1e-6)
    assert caches == ()


def test_fit_separates_the_cost_per_call_from_alpha():
    """On two ranks a ring takes two messages and doubling one, but both are one call."""
    names, sizes = ("ring", "direct", "doubling"), (1 << 10, 1 << 12, 1 << 20)
    machine = Machine(alpha=2e-7, beta=1e-11, gamma=0, call=1e-6)
    made = [
        (p := closed("all_reduce", name, 2), size, seconds(p, machine, size))
        for name in names
        for size in sizes
    ]
    for p, size, took in made:
        assert seconds(p, fit(made), size) == pytest.approx(took, rel=1e-6)


def test_fit_keeps_every_term_at_zero_or_above():
    rows = [(closed("all_reduce", "ring", 2), size, 1e-5 + size * 1e-10) for size in (1, 1 << 20)]
    rows.append((closed("all_reduce", "ring", 4), 1 << 20, 2e-5))
    assert all(term >= 0 for term in fit(rows)[:-1])
    with pytest.raises(UsageError, match="at least one"):
        fit([])


CACHED = Machine(1e-6, 0.0, 0.0, bus=1e-11, call=1e-6, caches=((1 << 22, 4e-11), (1 << 25, 2e-11)))


@pytest.mark.parametrize("ranks", [(2,), (2, 3)])
def test_fit_finds_the_sizes_of_caches(ranks):
    rows = [
        (p := closed("all_reduce", "direct", n), size, seconds(p, CACHED, size))
        for n in ranks
        for size in (1 << k for k in range(10, 28))
    ]
    found = fit(rows)
    assert [end for end, _ in found.caches] == [end for end, _ in CACHED.caches]
    for p, size, _ in rows:
        for larger in (size, 100 * size):  # beyond the measured range the last line continues
            assert seconds(p, found, larger) == pytest.approx(seconds(p, CACHED, larger), rel=1e-6)


def test_a_cache_is_measured_at_twice_its_size_before_the_next_one_ends():
    sizes = [LEAST_CACHE / 2, *(LEAST_CACHE * x for x in (1, 1.5, 2, 3, 4, 7, 8))]
    assert _ends(sizes) == [LEAST_CACHE * x for x in (1, 2, 4)]


def test_noise_at_the_largest_sizes_does_not_bend_the_extrapolation():
    """1 % of noise between two rows of nearly the largest size must not be fitted as the end of a
    cache."""
    p = closed("all_gather", "direct", 2)
    rows = [(p, 1 << k, 1e-6 + (1 << k) * 1e-10) for k in range(10, 25, 2)]
    rows.append((p, (1 << 24) + 4096, 1.01 * rows[-1][2]))
    assert seconds(p, fit(rows), 1 << 30) == pytest.approx(1e-10 * (1 << 30), rel=0.02)


def test_alternating_buffers_cost_as_much_per_byte_as_one_large_buffer():
    p, most = closed("all_reduce", "direct", 2), 1 << 28
    once = CACHED.call + p.messages * CACHED.alpha
    turns = [seconds(p, CACHED, most // 64, among=most) - once for _ in range(64)]
    assert sum(turns) == pytest.approx(seconds(p, CACHED, most) - once)
    assert sum(turns) > 2 * 64 * (seconds(p, CACHED, most // 64) - once)
    assert seconds(p, CACHED, most, among=1) == seconds(p, CACHED, most)
    assert seconds(p, CACHED, 0) == once


def test_an_unknown_algorithm_has_no_closed_form():
    with pytest.raises(UsageError, match="ring, two_way_ring"):
        closed("all_reduce", "magic", 4)


@pytest.mark.parametrize(("collective", "n"), [("nonsense", 4), ("all_reduce", 0)])
def test_prices_of_unknown_collectives_and_empty_groups_are_refused(collective, n):
    with pytest.raises(UsageError, match=r"no collective 'nonsense'|at least 1 rank, got 0"):
        closed(collective, "ring", n)
    with pytest.raises(UsageError, match=r"no collective 'nonsense'|at least 1 rank, got 0"):
        choose(collective, n, 1024, Machine(1e-5, 1e-10, 0))
