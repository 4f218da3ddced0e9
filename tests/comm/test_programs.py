"""What is remembered of an algorithm that is made anew for every call."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from ringdp import Communicator
from ringdp.comm import programs
from ringdp.comm.call import CUSTOM, fingerprint
from ringdp.schedule import Schedule, project, schedule
from ringdp.transport.bounds import uneven_bounds
from tests.comm.failing import leaves_nothing
from tests.ranks import on_ranks
from tests.schedule.test_program import by_name


def made() -> Callable[[int], Schedule]:
    return lambda n: schedule("all_reduce", "ring", n)


def use(algorithm: Callable[[int], Schedule]) -> int:
    """Where the rows of its program are."""
    program = programs.program("all_reduce", algorithm, 2, 0, 0, 4)
    for elements in (7, 8):
        uneven_bounds((elements, elements), program)
    assert fingerprint("all_reduce", torch.float32, "sum", 0, algorithm) >> 55 == CUSTOM
    return int(program.rows.ctypes.data)


def test_a_function_is_remembered_as_long_as_it_lives():
    first = made()
    seen, address = weakref.ref(first), use(first)
    assert use(first) == address
    origin = programs.origin_of(address)
    assert origin is not None
    assert origin.algorithm.endswith("<lambda>")
    assert "send" in origin.names.values()
    del first
    assert seen() is None


def test_of_others_only_the_last_are_remembered():
    kept = len(programs._origins)
    for _ in range(2 * programs.MOST):
        use(partial(schedule, "all_reduce", "ring"))
    assert programs.MOST <= len(programs._origins) <= kept + programs.MOST + 1


def used(comm: Communicator) -> weakref.ref[Communicator]:
    """By an algorithm that holds it: a cycle through C++."""
    comm.all_reduce(torch.ones(4), algorithm=lambda n: schedule("all_reduce", "ring", comm.size))
    return weakref.ref(comm)


@pytest.mark.process
@on_ranks(2)
@leaves_nothing
def test_an_algorithm_that_holds_its_communicator_does_not_keep_it(comm: Communicator) -> None:
    seen = used(comm.duplicate())
    gc.collect()
    assert seen() is None


@by_name
def test_where_nobody_waits_to_send_a_program_is_made_alone(monkeypatch, algorithm):
    asked = algorithm.collective, algorithm.name, 6
    many = [programs.program(*asked, rank, 0, 1 << 20) for rank in range(6)]
    made: list[int] = []
    monkeypatch.setattr(programs, "project", lambda s, r: made.append(r) or project(s, r))
    alone = [programs.program(*asked, rank, 0, math.inf) for rank in range(6)]
    assert made == [*range(6)]
    for one, other in zip(alone, many, strict=True):
        assert (one.rows == other.rows).all()
        assert one.alike == other.alike
