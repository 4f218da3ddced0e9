"""Ctrl-C at any moment of a call, a wait or a close: what has a number has begun, and what has none
has not, so that ranks which call again what did not count get the right sums."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from ringdp import Communicator
from ringdp.errors import PeerLost
from tests.ranks import on_ranks
from tests.transport.nccl.faults import needs_host_nccl
from tests.transport.over import over

T = TypeVar("T")
CALLS = 150
LATEST = 400e-6  # s into what is interrupted: most of it takes less


def attempt(act: Callable[[], T]) -> T | None:
    """What it gives, which is not None; or that, where an interrupt came first."""
    armed = True

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, LATEST))
        return act()
    except KeyboardInterrupt:
        return None
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def until_done(act: Callable[[], object]) -> None:
    while not attempt(lambda: [act()]):
        pass


def calls_interrupted(comm: Communicator) -> tuple[int, int]:
    """How many did not count, and how many did and have no caller any more."""
    prevented = left = 0
    while (number := comm.issued) < CALLS:
        x = torch.full((5, 2), float(number + comm.rank))[:, number % 3 // 2]
        algorithm, later = ("direct", "ring")[number % 2], number % 4 < 2
        work = attempt(lambda: comm.all_reduce(x, algorithm=algorithm, async_op=later))  # noqa: B023
        begun = comm.issued - number
        assert begun == 1 or (begun, work) == (0, None)
        prevented += not begun
        left += begun and work is None
        if work is not None:
            until_done(work.wait)
            assert bool((x == 2 * number + 1).all())
    comm.barrier()
    if comm.rank == 0:
        until_done(comm.close)
    else:
        with pytest.raises(PeerLost):
            comm.barrier()
    return prevented, left


@pytest.mark.parametrize(
    "transport", ["shm", "c10d", pytest.param("nccl-host", marks=needs_host_nccl), "peer-host"]
)
@on_ranks(2)
def test_what_is_interrupted_has_begun_if_it_counts(comm: Communicator, transport: str) -> None:
    prevented, left = over(comm, transport, calls_interrupted)
    assert prevented
    assert left


def agreed_and_left(comm: Communicator) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def agree(tensor: torch.Tensor) -> Any:
        comm.all_reduce(tensor)
        return SimpleNamespace(wait=interrupted)

    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            comm._agreed(agree, torch.zeros(1))
    else:
        with pytest.raises(PeerLost, match="rank 0 has given up"):
            comm.duplicate()
    with pytest.raises(PeerLost):
        comm.barrier()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_who_makes_a_communicator_does_not_wait_for_who_has_left(
    comm: Communicator, transport: str
) -> None:
    over(comm, transport, agreed_and_left)
