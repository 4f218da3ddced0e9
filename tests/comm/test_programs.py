"""What is remembered of an algorithm that is made anew for every call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch

from ringdp.comm import programs
from ringdp.comm.call import OWN, fingerprint
from ringdp.schedule import Schedule, schedule


def made() -> Callable[[int], Schedule]:
    return lambda n: schedule("all_reduce", "ring", n)


def use(algorithm: Callable[[int], Schedule]) -> int:
    """Where the rows of its program are."""
    program = programs.program("all_reduce", algorithm, 2, 0, 0, 4)
    for elements in (7, 8):
        programs.whole_bounds(program, (elements, elements))
    assert fingerprint("all_reduce", torch.float32, "sum", 0, algorithm) >> 55 == OWN
    return int(program.rows.ctypes.data)


def test_only_the_last_are_remembered():
    first = made()
    seen, address = weakref.ref(first), use(first)
    origin = programs.origin_of(address)
    assert origin is not None
    assert origin.builder is first
    assert "send" in origin.names.values()
    del first, origin
    for _ in range(2 * programs.MOST):
        use(made())
    gc.collect()
    assert seen() is None
    assert len(programs._origins) <= 2 * programs.MOST
