"""The cache of programs for user algorithms, which may be new functions at every call."""

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


def new_algorithm() -> Callable[[int], Schedule]:
    return lambda n: schedule("all_reduce", "ring", n)


def use_algorithm(algorithm: Callable[[int], Schedule]) -> int:
    """The address of the rows of its program."""
    program = programs.program("all_reduce", algorithm, 2, 0, 0, 4)
    for elements in (7, 8):
        uneven_bounds((elements, elements), program)
    assert fingerprint("all_reduce", torch.float32, "sum", 0, algorithm) >> 55 == CUSTOM
    return int(program.rows.ctypes.data)


def test_a_functions_program_is_kept_as_long_as_the_function():
    first = new_algorithm()
    seen, address = weakref.ref(first), use_algorithm(first)
    assert use_algorithm(first) == address
    origin = programs.origin_of(address)
    assert origin is not None
    assert origin.algorithm.endswith("<lambda>")
    assert "send" in origin.names.values()
    del first
    assert seen() is None


def test_of_other_callables_only_the_latest_programs_are_kept():
    kept = len(programs._origins)
    for _ in range(2 * programs.MOST):
        use_algorithm(partial(schedule, "all_reduce", "ring"))
    assert programs.MOST <= len(programs._origins) <= kept + programs.MOST + 1


def use_cyclic_algorithm(comm: Communicator) -> weakref.ref[Communicator]:
    """Uses an algorithm that refers to the communicator, which makes a cycle through C++."""
    comm.all_reduce(torch.ones(4), algorithm=lambda n: schedule("all_reduce", "ring", comm.size))
    return weakref.ref(comm)


@pytest.mark.process
@on_ranks(2)
@leaves_nothing
def test_an_algorithm_that_refers_to_its_communicator_does_not_leak_it(comm: Communicator) -> None:
    seen = use_cyclic_algorithm(comm.duplicate())
    gc.collect()
    assert seen() is None


@by_name
def test_with_unlimited_fifos_only_the_ranks_own_program_is_built(monkeypatch, algorithm):
    arguments = algorithm.collective, algorithm.name, 6
    many = [programs.program(*arguments, rank, 0, 1 << 20) for rank in range(6)]
    new_algorithm: list[int] = []
    monkeypatch.setattr(programs, "project", lambda s, r: new_algorithm.append(r) or project(s, r))
    alone = [programs.program(*arguments, rank, 0, math.inf) for rank in range(6)]
    assert new_algorithm == [*range(6)]
    for one, other in zip(alone, many, strict=True):
        assert (one.rows == other.rows).all()
        assert one.alike == other.alike
