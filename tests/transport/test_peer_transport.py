"""The transport over peer memory, its kernels as threads: launches, windows, and how it fails."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.comm import rendezvous
from ringdp.schedule import Schedule, schedule
from ringdp.transport.device import in_flight
from ringdp.transport.peer.jobs import LINE, SLAB
from ringdp.transport.peer.kernels import Kernels, Launch
from ringdp.transport.peer.transport import DEPTH, MOST, shape
from ringdp.transport.peer.windows import Windows
from tests.comm.failing import Heard, hear
from tests.forks import CALL_TIMEOUT
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def crossed(comm: Communicator) -> Heard | None:
    """Rank 1's stamp and rank 0's are the same, and what rank 3 sends has the length of its own."""
    x, four = torch.ones(100), torch.ones(400) if comm.rank == 3 else None
    comm.barrier()
    if comm.rank < 2:
        return hear(comm, lambda: comm.broadcast(x, 3, algorithm="binomial"))
    return hear(comm, lambda: comm.scatter(x, four, 3), comm.barrier)


def test_no_rank_takes_for_its_own_what_another_collective_sent(over_peer):
    for heard in over_peer(4)(crossed):
        assert heard.error == heard.again == "CollectiveMismatch", heard


def lost(comm: Communicator) -> Heard | None:
    c = ringdp.init(transport="peer-host", timeout=CALL_TIMEOUT)
    c.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return hear(c, lambda: c.all_reduce(torch.ones(5000)))


def test_a_killed_rank_is_named_on_every_other(fresh_ranks):
    said = fresh_ranks(3).outcomes(lost)
    assert said[1] is None
    for rank in (0, 2):
        assert said[rank].error == said[rank].again == "PeerLost", said[rank]
        assert "rank 1 has ended" in said[rank].text


def too_long(n: int) -> Schedule:
    ring, times = schedule("all_reduce", "ring", n), 1000
    rounds = [
        tuple(
            t._replace(read=t.read + k * ring.chunks, write=t.write + k * ring.chunks)
            for k in range(times)
            for t in transfers
        )
        for transfers in ring.rounds
    ]
    return Schedule(n, times * ring.chunks, tuple(rounds))


@on_ranks(2, pool="over_peer")
def test_an_algorithm_with_too_many_rows_is_refused_before_it_moves(comm: Communicator) -> None:
    x = torch.ones(7)
    with pytest.raises(ringdp.UsageError, match="bytes of shared memory, more than"):
        comm.all_reduce(x, algorithm=too_long)
    comm.all_reduce(x)
    assert torch.all(x == comm.size)


@on_ranks(2, pool="over_peer")
def test_a_rank_that_exits_waits_for_nobodys_windows(comm: Communicator) -> None:
    running = set(threading.enumerate())
    other = comm.duplicate()
    if comm.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_flight, "PATIENCE", CALL_TIMEOUT)
            other.close()
            other._transport.end()
            until = time.monotonic() + CALL_TIMEOUT / 6
            while set(threading.enumerate()) - running:
                assert time.monotonic() < until, threading.enumerate()
                time.sleep(0.01)
    comm.barrier()
    other.close()


class Spied:
    def __init__(self, windows: Windows) -> None:
        self._windows, self.calls = windows, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._windows, name)


def replayed(comm: Communicator, captured: bool) -> tuple[list[str], bool]:
    """What becomes of the windows of a communicator that fails while graphs may be replayed, and
    whether all else that a kernel reads or writes stays."""
    other = comm.duplicate()
    transport = other._transport
    transport._windows = spied = Spied(transport._windows)
    if captured:
        transport._captured.add(torch.zeros(1))
    at = transport._counts, transport._table, transport._failure, *transport._captured
    used = [weakref.ref(x) for x in at]
    del at
    comm.barrier()
    other.abort()
    until = time.monotonic() + CALL_TIMEOUT
    while not transport._left or transport._captured or not (captured or "close" in spied.calls):
        assert time.monotonic() < until
        time.sleep(0.01)
    comm.barrier()
    del other, transport
    gc.collect()
    return spied.calls, all(x() is not None for x in used)


def test_a_replay_that_may_run_is_stopped_and_keeps_its_windows(over_peer):
    assert over_peer(2)(replayed, True) == [(["stop"], True)] * 2
    over_peer(2)(replayed, False)


@on_ranks(2, pool="over_peer")
def test_windows_are_freed_after_a_failure_once_all_kernels_have_ended(comm: Communicator) -> None:
    """Where rank 0's kernel waits for a rank that aborts."""
    other = comm.duplicate()
    other._transport._windows = spied = Spied(other._transport._windows)
    if comm.rank == 0:
        other.all_reduce(torch.ones(9), async_op=True)
        while not other._transport._status.state().record.begun:
            time.sleep(0.01)
    comm.barrier()
    if comm.rank == 1:
        other.abort()
    until = time.monotonic() + CALL_TIMEOUT / 6
    while "free" not in spied.calls:
        assert time.monotonic() < until, spied.calls
        time.sleep(0.01)
    assert ("stop" in spied.calls) == (comm.rank == 0)


class Counted:
    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self.launches = kernels, 0

    def launch(self, launch: Launch) -> None:
        self.launches += 1
        self._kernels.launch(launch)


@on_ranks(2, pool="over_peer")
def test_a_call_is_one_launch_and_the_same_again_makes_no_other_job(comm: Communicator) -> None:
    transport, x = comm._transport, torch.ones(100)
    transport._kernels = counted = Counted(transport._kernels)
    comm.all_reduce(x)
    assert counted.launches == 1
    made, room = len(transport._jobs_made), len(transport._staging)
    for _ in range(3):
        comm.all_reduce(x)
    assert len(transport._jobs_made) == made
    comm.all_reduce(x.bfloat16())
    assert len(transport._staging) > room
    comm.all_reduce(x)  # as in a graph that is captured now
    assert len(transport._jobs_made) == made + 1


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 300])
def test_a_window_is_no_larger_than_it_may_be(ranks: int):
    made = shape(ranks, channels=16)
    made.check()
    held = ranks * 16 * DEPTH * made.slab
    assert held <= MOST or made.slab == LINE
    assert made.slab == SLAB if ranks <= 8 else 2 * held > MOST


def apart(comm: Communicator) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host", lambda: f"host{comm.rank} boot{comm.rank}")
        with pytest.raises(ringdp.CommunicationError) as error:
            ringdp.init(transport="peer-host", timeout=CALL_TIMEOUT)
    return str(error.value)


def test_ranks_of_two_hosts_are_told_what_to_take(ranks):
    for said in ranks(2)(apart):
        assert "on host host" in said
        assert "allowed: one host, or between hosts transport 'nccl', or 'c10d'" in said


def test_it_says_what_it_needs():
    with pytest.raises(ringdp.UsageError, match=r"'peer' needs a CUDA device, .*'peer-host'"):
        ringdp.init(transport="peer")
