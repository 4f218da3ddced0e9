"""Methods whose second calls stay in C++, since small messages take a microsecond.

A call like one before (op, root, tag, algorithm, dtype and length the same, its tensors flat
buffers) is found, numbered, told the user's line and run (with async_op: begun) by csrc/ready.hpp.
Every other one goes to the method, so that Python alone says what it means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ringdp._core import SLICE as SLICE  # s that one waits until Python looks for Ctrl-C
from ringdp._core import Repeated

METHODS = (  # in csrc's order
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
F = TypeVar("F", bound=Callable[..., object])


def repeated(method: F) -> F:
    """For a method of Communicator."""
    made: F = Repeated(METHODS.index(method.__name__), method)  # type: ignore[assignment]
    return made
