"""Where the chunks of a buffer begin and end."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ringdp.schedule import ALGORITHMS, project, schedule
from ringdp.transport.bounds import chunk_bounds

PROGRAMS = [
    project(schedule(a.collective, a.name, n), 0) for a in ALGORITHMS for n in (1, 2, 3, 4, 6, 8)
]


@given(st.integers(0, 10**12), st.sampled_from(PROGRAMS))
def test_chunks_cover_the_buffer_in_nearly_equal_parts(elements, program):
    if program.alike:
        # other lengths cannot be split equally, and are refused elsewhere
        elements -= elements % program.chunks
    bounds = chunk_bounds(elements, program)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert len(sizes) == program.chunks
    assert (bounds[0], bounds[-1]) == (0, elements)
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) <= 2  # each of its two bounds is rounded


@given(st.integers(0, 10**9), st.sampled_from(PROGRAMS))
def test_all_algorithms_give_a_rank_the_same_shard(each, program):
    if program.chunks % program.ranks:
        return
    bounds = chunk_bounds(each * program.ranks, program)
    own = program.chunks // program.ranks
    assert list(bounds[::own]) == [r * each for r in range(program.ranks + 1)]
