"""Communicator methods whose repeated calls stay in C++, as small messages take a microsecond.

If a call repeats an earlier one (same op, root, tag, algorithm, dtype, length and sizes of parts,
tensors that are flat buffers), csrc/ready.hpp looks it up, numbers it, records the user's line and
runs it (starts it, with async_op). A message that fits into a slab is sent if its channel has room,
and received if it comes within 20 µs, with no other call or message of its tag to match first.
Every other call goes to the Python method, which alone defines the semantics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ringdp._core import SLICE as SLICE  # s that a call waits in C++ between checks for Ctrl-C
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
    "send",
    "isend",
    "recv",
    "reduce_scatter_v",
    "all_gather_v",
    "gather_v",
    "scatter_v",
    "all_to_all_v",
)
F = TypeVar("F", bound=Callable[..., object])


def repeated(method: F) -> F:
    """Decorate a method of Communicator."""
    made: F = Repeated(METHODS.index(method.__name__), method)  # type: ignore[assignment]
    return made
