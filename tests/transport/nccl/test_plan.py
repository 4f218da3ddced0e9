"""Plans executed in any order of ranks give the simulator's bits, without a device and without
NCCL."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from torch import Tensor

from ringdp.schedule import ALGORITHMS, Program, Schedule, Transfer, fuse, project, schedule
from ringdp.transport.base import Op
from ringdp.transport.bounds import chunk_bounds
from ringdp.transport.nccl.execute import fold_tile
from ringdp.transport.nccl.plan import plan
from ringdp.transport.nccl.tiles import Tiles, longest, slab_of, staging_shape
from ringdp.transport.simulator import simulate
from tests.schedule.test_fuse import schedules

SLAB = 48  # elements; most chunks below have several tiles


def run(programs: list[Program], buffers: list[Tensor], op: Op = "sum") -> None:
    """Executes all ranks' plans in one thread; a group ends when all its messages have arrived."""
    tiles = []
    for program, buffer in zip(programs, buffers, strict=True):
        made, bounds = plan(program), chunk_bounds(buffer.numel(), program)
        staging = buffer.new_empty(staging_shape(made, bounds, SLAB)).view(-1)
        if staging.is_floating_point():
            staging.fill_(torch.nan)  # data that was never written must not be read
        tiles.append(Tiles(made, buffer, bounds, staging, SLAB))
    numbers = sorted({one.number for t in tiles for one in t.plan.rounds})
    for tile in range(max(t.count for t in tiles)):
        for number in numbers:
            sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
            ones = {r: s for r, t in enumerate(tiles) for s in t.plan.rounds if s.number == number}
            for rank, one in ones.items():
                for fold in one.folds:
                    fold_tile(tiles[rank], fold, tile, op)
                for call in (*one.sends, *one.receives):
                    where = call.place, call.like, tile
                    value, (address, size) = tiles[rank].place(*where), tiles[rank].bytes_of(*where)
                    assert size == value.nbytes
                    assert not size or address == value.data_ptr()
                for call in one.sends:
                    value = tiles[rank].place(call.place, call.like, tile)
                    sent[rank, call.peer].append(value.clone())
            for rank, one in ones.items():
                for call in one.receives:
                    out = tiles[rank].place(call.place, call.like, tile)
                    out.copy_(sent[call.peer, rank].popleft())
            assert not any(sent.values()), "a message that no rank receives"


def check(made: Schedule, elements: int, dtype: torch.dtype, op: Op = "sum") -> None:
    programs = [project(made, r) for r in range(made.ranks)]
    g = torch.Generator().manual_seed(elements)
    inputs = [torch.randn(elements, generator=g).mul_(100).to(dtype) for _ in programs]
    found, expected = [x.clone() for x in inputs], [x.clone() for x in inputs]
    run(programs, found, op)
    simulate([fuse(p) for p in programs], expected, op, depth=64)
    for rank in range(made.ranks):
        assert torch.equal(found[rank], expected[rank]), rank


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize(("collective", "name"), [a[:2] for a in ALGORITHMS])
def test_a_plan_gives_the_simulators_bits(collective: str, name: str, n: int):
    made = schedule(collective, name, n)
    for elements, dtype in ((7, torch.float32), (1003, torch.bfloat16)):
        # all_to_all needs equal chunks
        uneven = elements % made.chunks if "all_to_all" in collective else 0
        check(made, elements - uneven, dtype)


@pytest.mark.parametrize("op", ["prod", "max"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float16])
def test_folds_of_every_kind_of_dtype_give_the_simulators_bits(op: Op, dtype: torch.dtype):
    for name in ("direct", "ring", "halving"):
        check(schedule("all_reduce", name, 4), 301, dtype, op)


def test_a_delayed_sum_uses_its_original_inputs():
    """Rank 0 adds chunk 0 to chunk 1 before chunk 0 is replaced, and reads the sum after that."""
    rounds = (
        (Transfer(0, 0, 0, 1, True),),
        (Transfer(1, 0, 0, 0, False),),
        (Transfer(0, 1, 1, 1, False),),
        (Transfer(0, 0, 0, 1, True), Transfer(1, 1, 1, 0, True)),
        # changes chunk 0, whose old value is still to be added to chunk 1
        (Transfer(1, 0, 1, 0, True),),
        (Transfer(0, 1, 0, 1, False),),
    )
    check(Schedule(2, 2, rounds), 400, torch.float32)


def test_a_sum_in_scratch_may_be_copied_twice_in_one_round():
    rounds = (
        (Transfer(0, 0, 0, 2, False),),
        (Transfer(1, 0, 0, 2, True),),
        (Transfer(0, 0, 2, 0, False), Transfer(0, 0, 2, 1, False)),
    )
    check(Schedule(2, 2, rounds), 400, torch.float32)


def test_scratch_may_be_added_twice_in_one_round():
    twice = Transfer(1, 1, 1, 0, True)
    check(Schedule(2, 1, ((Transfer(0, 1, 0, 1, False),), (twice, twice))), 400, torch.int32)


@given(schedules())
def test_a_plan_of_any_schedule_gives_the_simulators_bits(made: Schedule):
    check(made, 50 * made.chunks, torch.int32)


def test_relayed_scratch_has_the_length_of_its_chunk():
    """Chunks of 2, 1 and 1 elements are relayed through scratch of a rank that uses it for nothing
    else."""
    rounds = (
        tuple(Transfer(0, 1, c, 3 + c, False) for c in range(3)),
        tuple(Transfer(1, 2, 3 + c, 4 + c, False) for c in range(3)),
        tuple(Transfer(2, 0, 4 + c, c, True) for c in range(3)),
    )
    made = Schedule(3, 3, rounds)
    assert project(made, 2).incoming == {(1, 4): 0, (1, 5): 1, (1, 6): 2}
    check(made, 4, torch.float32)


def test_staging_does_not_grow_with_the_rounds():
    ring = [plan(project(schedule("all_reduce", "ring", n), 1)).rows for n in (3, 8, 16)]
    assert max(ring) == 1
    direct = [plan(project(schedule("all_reduce", "direct", n), 1)).rows for n in (3, 8)]
    assert direct == [2, 7]


@pytest.mark.parametrize("name", ["ring", "two_way_ring", "direct", "tree"])
def test_tiles_use_nearly_all_of_the_staging(name: str):
    """Equal on all ranks, although a tree's leaves stage nothing."""
    for n in (2, 5, 8):
        made = schedule("all_reduce", name, n)
        programs = [project(made, rank) for rank in range(n)]
        bounds = chunk_bounds(1 << 30, programs[0])
        (slab,) = {slab_of(p, bounds, 1 << 20) for p in programs}
        most = max(prod(staging_shape(plan(p), bounds, slab)) for p in programs)
        assert 0.9 * (1 << 20) < most <= 1 << 20


def test_a_plan_without_staging_is_one_tile():
    made = project(schedule("all_gather", "ring", 4), 1)
    for elements in (0, 1, 1 << 40):
        bounds = chunk_bounds(elements, made)
        assert longest(bounds) == -(-elements // 4)
        assert slab_of(made, bounds, 64) >= longest(bounds)


@pytest.mark.parametrize(("collective", "name"), [a[:2] for a in ALGORITHMS])
def test_a_fold_is_one_pass(collective: str, name: str):
    """A fold reads adjacent rows of staging and at most one chunk in place; only all_to_all has
    copies."""
    for n in range(2, 9):
        for rank in range(n):
            made = plan(project(schedule(collective, name, n), rank))
            for fold in (f for one in made.rounds for f in one.folds):
                staged = [p for p in fold.parts if p >= made.chunks]
                assert all(b - a == 1 for a, b in pairwise(staged))
                assert len(fold.parts) - len(staged) < 2
                assert len(fold.parts) > 1 or collective == "all_to_all"
