"""What tests of failures share: collectives to fail in, and what a rank hears of a failure."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ringdp import CommunicationError, Communicator, Work


class Heard(NamedTuple):
    """An error as one rank got it; `at` is on the clock that all processes of a host share."""

    error: str
    text: str
    at: float
    seconds: float
    again: str  # the error of the next call


def hear(comm: Communicator, *calls: Callable[[], object]) -> Heard | None:
    """The first error of the calls, in their order."""
    start = time.monotonic()
    try:
        for call in calls:
            call()
    except CommunicationError as e:
        now = time.monotonic()
        with pytest.raises(CommunicationError) as again:
            comm.barrier()
        return Heard(type(e).__name__, str(e), now, now - start, type(again.value).__name__)
    return None


def held() -> tuple[int, int]:
    """This process's mapped segments and its descriptors."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:ringdp"), len(os.listdir("/proc/self/fd"))


def leaves_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks that what it does to `comm`'s duplicates leaves no memory and no descriptor."""

    @wraps(function)
    def run(comm: Communicator, *arguments: Any) -> Any:
        before = held()
        result = function(comm, *arguments)
        assert held() == before
        comm.barrier()
        return result

    return run


def fallible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives it a duplicate to ruin, and checks that its end leaves nothing."""

    @wraps(function)
    def run(comm: Communicator, *arguments: Any) -> Any:
        with comm.duplicate() as other:
            other.barrier()  # collective 0
            return function(other, *arguments)

    return leaves_nothing(run)


# Each moves x, or so many elements from or to every rank.
COLLECTIVES: dict[str, Callable[..., Work]] = {
    "all_reduce": lambda c, x, **how: c.all_reduce(x, **how),
    "reduce_scatter": lambda c, x, **how: c.reduce_scatter(
        torch.empty_like(x), all_of(c, x), **how
    ),
    "all_gather": lambda c, x, **how: c.all_gather(all_of(c, x), x, **how),
    "broadcast": lambda c, x, **how: c.broadcast(x, **how),
    "reduce": lambda c, x, **how: c.reduce(x, **how),
    "gather": lambda c, x, **how: c.gather(all_of(c, x), x, **how),
    "scatter": lambda c, x, **how: c.scatter(x, all_of(c, x), **how),
    "all_to_all": lambda c, x, **how: c.all_to_all(all_of(c, x), all_of(c, x), **how),
}


def all_of(comm: Communicator, x: Tensor) -> Tensor:
    return x.repeat(comm.size)
