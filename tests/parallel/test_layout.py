"""Layouts: ranks' slices cover each parameter once, in order; shards are equal and aligned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringdp.parallel.layout import ALIGNMENT, layout

SIZES = st.lists(st.lists(st.integers(0, 200), max_size=6), min_size=1, max_size=4)


def plan(sizes: list[list[int]], ranks: int):
    named = [(f"u{i}", [(f"p{j}", n) for j, n in enumerate(u)]) for i, u in enumerate(sizes)]
    return layout(named, ranks)


@given(SIZES, st.integers(1, 9))
def test_slices_cover_every_parameter_once_and_in_order(sizes, ranks):
    for unit, elements in zip(plan(sizes, ranks), sizes, strict=True):
        for entry, n in zip(unit.entries, elements, strict=True):
            covered: list[int] = []
            parts: list[int] = []
            for rank in range(ranks):
                begin, end = unit.local(entry, rank)
                assert 0 <= begin <= end <= unit.shard
                first = rank * unit.shard
                covered += range(first + begin, first + end)
                parts += (part := range(*unit.part(entry, rank)))
                assert len(part) == end - begin
            assert covered == list(range(entry.offset, entry.offset + n))
            assert parts == list(range(n))


@given(SIZES, st.integers(1, 9))
def test_padding_is_less_than_one_quantum_and_shards_are_aligned(sizes, ranks):
    for unit, elements in zip(plan(sizes, ranks), sizes, strict=True):
        assert unit.elements == sum(elements)
        assert 0 <= unit.padded - unit.elements < ranks * ALIGNMENT
        assert unit.shard * ranks == unit.padded
        assert unit.shard % ALIGNMENT == 0


@given(SIZES, st.integers(1, 9))
def test_owned_parts_are_the_nonempty_slices(sizes, ranks):
    for unit, elements in zip(plan(sizes, ranks), sizes, strict=True):
        owned = [unit.owned(r) for r in range(ranks)]
        assert all(n > 0 for parts in owned for n in parts)
        assert sum(map(sum, owned)) == sum(elements)


def test_a_drawn_example():
    (unit,) = plan([[20, 0, 5, 40]], ranks=2)
    assert [e.offset for e in unit.entries] == [0, 20, 20, 25]
    assert (unit.padded, unit.shard) == (96, 48)
    assert [unit.local(e, 0) for e in unit.entries] == [(0, 20), (20, 20), (20, 25), (25, 48)]
    assert [unit.local(e, 1) for e in unit.entries] == [(0, 0), (0, 0), (0, 0), (0, 17)]
    assert (unit.owned(0), unit.owned(1)) == ([20, 5, 23], [17])
