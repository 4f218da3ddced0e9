"""The formulas are ZeRO's closed forms (Rajbhandari et al. 2020, figure 1), in float32:

16Ψ bytes, 8Ψ + 8Ψ/n, 4Ψ + 12Ψ/n and 16Ψ/n, with traffic of 2Ψ elements, and 3Ψ in stage 3.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringdp
from ringdp.parallel.accounting.formula import Sharding, formula, traffic
from ringdp.parallel.accounting.memory import Ledger, Widths, state_bytes
from ringdp.parallel.layout import layout
from ringdp.parallel.ranks import ranks_of
from ringdp.parallel.stages import STAGES, Keep, stage_of


def plan(sizes, ranks):
    return layout([(f"u{i}", [("w", n)]) for i, n in enumerate(sizes)], ranks)


FLOAT32 = Widths(4, 4, 4)


def sharding(sizes, ranks, stage, limit=0):
    """Every unit in a module of its own."""
    groups = [[i] for i in range(len(sizes))]
    return Sharding(plan(sizes, ranks), [FLOAT32] * len(sizes), groups, stage, limit)


def total(stage, ranks, sizes):
    """Bytes of states without the gather and bucket terms; exact if nothing is padded."""
    found = formula(sharding(sizes, ranks, STAGES[stage]), 0, per_element=8, per_parameter=0)
    return found.parameters + found.gradients + found.optimizer


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
def test_states_are_zeros_closed_forms(blocks, n):
    sizes = [128 * b for b in blocks]  # no padding for up to 8 ranks
    psi = sum(sizes)
    assert total(0, n, sizes) == 16 * psi
    # A rank owns 1/n of every unit, so its optimizer's share is exact as well.
    assert total(1, n, sizes) == 8 * psi + 8 * psi // n
    assert total(2, n, sizes) == 4 * psi + 12 * psi // n
    assert total(3, n, sizes) == 16 * psi // n


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
def test_traffic_is_two_psi_and_three_in_stage_3(blocks, n):
    sizes = [128 * b for b in blocks]
    share = 4 * (n - 1) * sum(sizes) // n

    def sent(limit):
        return [traffic(sharding(sizes, n, s, limit)) for s in STAGES]

    def once(units):  # units that are not freed between forward and backward
        return 4 * (n - 1) * sum(sizes[u] for u in units) // n

    assert sent(0) == [2 * share] * 3 + [3 * share - once([0])]
    largest = 4 * max(sizes[1:], default=0)
    assert sent(largest)[3] <= 3 * share - once({0, len(sizes) - 1})
    assert sent(4 * sum(sizes))[3] == 2 * share


@given(st.lists(st.integers(0, 999), min_size=1, max_size=5), st.integers(1, 9))
def test_the_optimizers_of_all_ranks_hold_each_element_once(sizes, n):
    for stage in STAGES[1:]:
        given = sharding(sizes, n, stage)
        ranks = [formula(given, r, per_element=8, per_parameter=0).optimizer for r in range(n)]
        assert sum(ranks) == 8 * sum(sizes)


def test_a_ledger_records_the_peak():
    ledger = Ledger(ranks_of(ringdp.init(), 1, 1), torch.device("cpu"), ringdp.Offload())
    ledger.take("buckets", 5)
    ledger.take("buckets", 7)
    ledger.give("buckets", 5)
    ledger.empty("buckets", 2, torch.float64)
    assert (ledger.now["buckets"], ledger.peak["buckets"]) == (23, 23)
    ledger.give("buckets", 23)
    assert (ledger.now["buckets"], ledger.peak["buckets"]) == (0, 23)


def test_an_optimizers_state_is_counted_in_bytes():
    p = torch.nn.Parameter(torch.ones(10))
    p.grad = torch.ones(10)
    adam = torch.optim.Adam([p])
    assert state_bytes(adam.state.values()) == 0
    adam.step()
    assert state_bytes(adam.state.values()) == 2 * 40 + 4


def test_each_stage_shards_one_more_kind_of_state():
    kept = [(s.optimizer, s.gradients, s.parameters) for s in STAGES]
    assert kept == [tuple([Keep.SHARD] * i + [Keep.FULL] * (3 - i)) for i in range(4)]
    assert [stage_of(i).number for i in range(4)] == [0, 1, 2, 3]
    assert [s.reduction for s in STAGES] == ["all_reduce"] + 3 * ["reduce_scatter"]
    for wrong in (-1, 4, "3", None):
        with pytest.raises(ValueError, match=r"it must be 0 \(DDP\), 1, 2 or 3"):
            stage_of(wrong)
