"""Ctrl-C at any moment of a call, a wait or a close. A call either has its number and has begun, or
has none and has not; so ranks that repeat calls without a number get the right sums."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ringdp import Communicator
from ringdp.errors import PeerLost
from tests.ranks import on_ranks
from tests.transport.nccl.faults import needs_host_nccl
from tests.transport.over import over
from tests.waiting import used_asleep

T = TypeVar("T")
CALLS = 150
LATEST_INTERRUPT = 400e-6  # seconds; most interrupted calls take less


def attempt(act: Callable[[], T]) -> T | None:
    """The result of `act`, which is not None, or None if an interrupt at a random time came
    first."""
    armed = True

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, LATEST_INTERRUPT))
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
    """How many calls were interrupted before they began, and how many after, so that their Work is
    lost."""
    not_begun = work_lost = 0
    while (number := comm.issued) < CALLS:
        x = torch.full((5, 2), float(number + comm.rank))[:, number % 3 // 2]
        algorithm, later = ("direct", "ring")[number % 2], number % 4 < 2
        work = attempt(lambda: comm.all_reduce(x, algorithm=algorithm, async_op=later))  # noqa: B023
        begun = comm.issued - number
        assert begun == 1 or (begun, work) == (0, None)
        not_begun += not begun
        work_lost += begun and work is None
        if work is not None:
            until_done(work.wait)
            assert bool((x == 2 * number + 1).all())
    comm.barrier()
    if comm.rank == 0:
        until_done(comm.close)
    else:
        with pytest.raises(PeerLost):
            comm.barrier()
    return not_begun, work_lost


@pytest.mark.parametrize(
    "transport", ["shm", "c10d", pytest.param("nccl-host", marks=needs_host_nccl), "peer-host"]
)
@on_ranks(2)
def test_an_interrupted_call_has_begun_or_has_no_effect(comm: Communicator, transport: str) -> None:
    not_begun, work_lost = over(comm, transport, calls_interrupted)
    assert not_begun
    assert work_lost


@on_ranks(2, pool="over_gloo")
def test_interrupted_messages_keep_no_thread_busy(comm: Communicator) -> None:
    """gloo's thread polls without end for memory that has been freed, and what a message needs is
    made in several calls."""
    x, other = torch.ones(20), 1 - comm.rank
    with comm.duplicate() as c:
        c.barrier()
        begun = 0
        for tag in range(CALLS):
            call = c.isend if (comm.rank + tag) % 2 else c.irecv
            begun += attempt(lambda: call(x, other, tag=tag)) is not None  # noqa: B023
        assert begun < CALLS
        (c.send if comm.rank else c.recv)(x, other, tag=CALLS)
        c.barrier()
        used = used_asleep(0.3)
        comm.barrier()
    assert used < 0.1


def interrupt_as_begins(function: str, file: str) -> None:
    """Raise KeyboardInterrupt once that function begins."""

    def trace(frame: FrameType, *_: object) -> None:
        if (frame.f_code.co_name, Path(frame.f_code.co_filename).name) == (function, file):
            sys.settrace(None)
            raise KeyboardInterrupt

    sys.settrace(trace)


def interrupt_the_making(comm: Communicator, function: str, file: str, split: bool) -> None:
    make = partial(comm.split, 0) if split else comm.duplicate
    if comm.rank == 0:
        interrupt_as_begins(function, file)
        with pytest.raises(KeyboardInterrupt):
            make()
    else:
        with pytest.raises(PeerLost, match="rank 0 has aborted"):
            make()
    with pytest.raises(PeerLost):
        comm.barrier()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize(
    ("function", "file"),
    [
        ("wait", "work.py"),
        ("_create", "communicator.py"),
        ("session", "handshake.py"),
        ("barrier", "handshake.py"),
    ],
)
@on_ranks(2)
def test_making_a_communicator_with_an_interrupted_rank_is_an_error(
    comm: Communicator, function: str, file: str, transport: str, split: bool
) -> None:
    """Wherever it is interrupted once the ranks have begun to agree."""
    over(comm, transport, interrupt_the_making, function, file, split)


def interrupt_a_receive(comm: Communicator) -> None:
    x, told = torch.ones(4), partial(comm._transport.message, comm.rank)

    def interrupt(*_: object) -> None:
        if told():
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    if comm.rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            comm.recv(x, 1)
        assert told() is None
    comm.barrier()
    if comm.rank:
        comm.send(x, 0)
    comm.barrier()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_an_interrupted_receive_is_no_longer_reported(comm: Communicator, transport: str) -> None:
    """Other ranks' errors would show this rank in it until the next receive that takes long."""
    over(comm, transport, interrupt_a_receive)


class Interrupting(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, _: object, given: Any = (), named: Any = None
    ) -> Any:
        if function is torch.Tensor.untyped_storage:
            raise KeyboardInterrupt
        return function(*given, **named or {})


@pytest.mark.parametrize("length", [8, 1 << 16])  # a brief call, and one that is not
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@on_ranks(2)
def test_an_interrupt_where_torch_runs_python_leaves_no_call_half_begun(
    comm: Communicator, algorithm: str, length: int
) -> None:
    """Torch asks a function mode, such as a `with torch.device(...)`, about the storage."""
    x = torch.ones(length)

    for _ in range(2):
        comm.all_reduce(x.fill_(1), algorithm=algorithm)
    x.fill_(1)
    comm.barrier()
    if comm.rank == 0:
        issued = comm.issued
        with Interrupting(), pytest.raises(KeyboardInterrupt):
            comm.all_reduce(x, algorithm=algorithm)
        assert len(comm._transport.kept) == comm.issued - issued
        if comm.issued == issued:
            comm.all_reduce(x, algorithm=algorithm, async_op=True)
        comm.send(torch.ones(1), 1)
    else:
        comm.recv(torch.ones(1), 0)  # before, rank 0's call cannot end
        comm.all_reduce(x, algorithm=algorithm)
    comm.barrier()
    assert x.tolist() == [2] * length


@on_ranks(2)
def test_shared_memory_of_an_interrupted_call_is_held_after_a_close(comm: Communicator) -> None:
    """A late rank may still write to it. The call is brief: it began before the interrupt."""
    other = comm.duplicate()
    x, arena = other.empty(8).fill_(1), comm._transport.arena  # type: ignore[attr-defined]
    other.all_reduce(x)
    comm.barrier()
    if comm.rank == 0:
        with Interrupting(), pytest.raises(KeyboardInterrupt):
            other.all_reduce(x)
        other.abort()
        other.close()
        _, held = arena._held[-1]
        assert [storage.data_ptr() for storage in held] == [x.data_ptr()]
    comm.barrier()
