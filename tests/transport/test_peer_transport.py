"""The peer-memory transport with its kernels as threads: launches, windows and failures."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.comm import rendezvous
from ringdp.schedule import Schedule, schedule
from ringdp.transport.device import in_flight
from ringdp.transport.peer import transport as peer
from ringdp.transport.peer.jobs import LINE, SLAB, stopped
from ringdp.transport.peer.kernels import Kernels, Launch
from ringdp.transport.peer.transport import CHANNELS, DEPTH, MOST, channels_on, shape
from ringdp.transport.peer.windows import HostWindows
from tests.comm.failing import catch
from tests.forks import CALL_TIMEOUT
from tests.ranks import on_ranks
from tests.waiting import wait_until

pytestmark = pytest.mark.process


@on_ranks(4, pool="over_peer")
def test_data_of_another_collective_is_never_accepted(comm: Communicator) -> None:
    """Ranks 0 and 1 wait in one collective with equal stamps, 2 and 3 in another. What rank 3 sends
    has the length that the others expect."""
    x, four = torch.ones(100), torch.ones(400) if comm.rank == 3 else None
    comm.barrier()
    if comm.rank < 2:
        caught = catch(comm, lambda: comm.broadcast(x, 3, algorithm="binomial"))
    else:
        caught = catch(comm, lambda: comm.scatter(x, four, 3), comm.barrier)
    assert caught.error == caught.again == "CollectiveMismatch", caught


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
def test_an_algorithm_with_too_many_rows_is_refused(comm: Communicator) -> None:
    x = torch.ones(7)
    with pytest.raises(ringdp.UsageError, match="bytes of shared memory, more than"):
        comm.all_reduce(x, algorithm=too_long)
    comm.all_reduce(x)
    assert torch.all(x == comm.size)


@on_ranks(2, pool="over_peer")
def test_a_rank_can_exit_while_others_map_its_window(comm: Communicator) -> None:
    comm._transport._watch()  # as a slow call does, on threads that stay
    running = set(threading.enumerate())
    other = comm.duplicate()
    if comm.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_flight, "PATIENCE", CALL_TIMEOUT)
            other.close()
            other._transport.end()
            wait_until(
                lambda: not set(threading.enumerate()) - running,
                CALL_TIMEOUT / 6,
                threading.enumerate,
            )
    comm.barrier()
    other.close()


class Spied:
    def __init__(self, windows: HostWindows) -> None:
        self._windows, self.calls = windows, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._windows, name)


@pytest.mark.parametrize("captured", [True, False])
@on_ranks(2, pool="over_peer")
def test_a_failure_stops_replays_and_keeps_their_windows(
    comm: Communicator, captured: bool
) -> None:
    """And everything else that a kernel uses, if graphs may still be replayed (`captured`)."""
    other = comm.duplicate()
    transport = other._transport
    transport._windows = spied = Spied(transport._windows)
    if captured:
        transport._captured.add(torch.zeros(1))
    failure = transport._failure
    at = transport._counts, transport._table, failure, *transport._captured
    used = [weakref.ref(x) for x in at]
    del at
    comm.barrier()
    other.abort()
    until = time.monotonic() + CALL_TIMEOUT
    while transport._captured or not (captured or "close" in spied.calls):
        assert time.monotonic() < until
        time.sleep(0.01)
    comm.barrier()
    assert int(failure) == (stopped(comm.rank) if captured else 0)
    del other, transport, failure
    gc.collect()
    if captured:
        assert not spied.calls
        assert all(x() is not None for x in used)


@on_ranks(2, pool="over_peer")
def test_windows_are_freed_after_a_failure_once_all_kernels_have_ended(comm: Communicator) -> None:
    """Rank 0's kernel waits for rank 1, which aborts."""
    other = comm.duplicate()
    transport = other._transport
    transport._windows = spied = Spied(transport._windows)
    if comm.rank == 0:
        other.all_reduce(torch.ones(9), async_op=True)
        while not transport._status.state().record.begun:
            time.sleep(0.01)
    comm.barrier()
    if comm.rank == 1:
        other.abort()
    wait_until(lambda: "free" in spied.calls, CALL_TIMEOUT / 6, lambda: spied.calls)
    assert int(transport._failure) == (stopped(0) if comm.rank == 0 else 0)


@on_ranks(2, pool="over_peer")
def test_launches_do_not_wait_for_a_drain(comm: Communicator) -> None:
    """On a GPU those of other communicators run on the same thread."""
    other, locked = comm.duplicate(), list[bool]()
    transport = other._transport
    transport._streams.drain = lambda: locked.append(transport._launching.locked())
    comm.barrier()
    other.abort()
    wait_until(lambda: len(locked) == 2, CALL_TIMEOUT / 6, lambda: locked)
    assert not any(locked)


class Counted:
    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self.launches = kernels, 0

    def launch(self, launch: Launch) -> None:
        self.launches += 1
        self._kernels.launch(launch)


@on_ranks(2, pool="over_peer")
def test_a_call_is_one_launch_and_repeating_it_reuses_its_job(comm: Communicator) -> None:
    transport, x = comm._transport, torch.ones(100)
    transport._kernels = counted = Counted(transport._kernels)
    comm.all_reduce(x)
    assert counted.launches == 1
    made, room = transport._made.cache_info().currsize, len(transport._staging)
    for _ in range(3):
        comm.all_reduce(x)
    assert transport._made.cache_info().currsize == made
    comm.all_reduce(x.bfloat16())
    assert len(transport._staging) > room
    comm.all_reduce(x)  # as when the call is captured in a graph now
    assert transport._made.cache_info().currsize == made + 1


@on_ranks(2, pool="over_peer")
def test_a_closed_transport_is_in_no_cycle(comm: Communicator) -> None:
    """Otherwise its memory would be kept until the garbage collector runs."""
    other = comm.duplicate()
    other.all_reduce(torch.ones(9))
    seen = weakref.ref(other._transport)
    gc.disable()
    try:
        other.close()
        del other
        wait_until(lambda: seen() is None, CALL_TIMEOUT / 6)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("multiprocessors", "channels"), [(132, 16), (64, 16), (56, 14), (14, 3), (1, 1)]
)
def test_several_communicators_fit_a_gpu_of_any_size(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, channels: int
) -> None:
    gpu = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert channels_on(torch.device("cuda:1")) == channels


@on_ranks(2)
def test_ranks_with_unlike_gpus_take_the_least_number_of_channels(comm: Communicator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "channels_on", lambda device: (5, 3)[comm.rank])
        other = ringdp.init(transport="peer-host", timeout=CALL_TIMEOUT)
    assert other._transport._shape.channels == 3
    x = torch.ones(10_007)
    other.all_reduce(x)
    assert torch.all(x == 2)
    other.close()


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 300])
def test_the_size_of_windows_is_bounded(ranks: int):
    made = shape(ranks, CHANNELS["cuda"])
    assert made.slab >= LINE
    assert made.slab % LINE == 0
    held = ranks * made.channels * DEPTH * made.slab
    assert held <= MOST or made.slab == LINE
    assert made.slab == SLAB if ranks <= 8 else 2 * held > MOST


@on_ranks(2)
def test_on_two_hosts_the_error_names_other_transports(comm: Communicator) -> None:
    allowed = "on host host.*allowed: one host, or between hosts transport 'nccl', or 'c10d'"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host", lambda: f"host{comm.rank} boot{comm.rank}")
        with pytest.raises(ringdp.CommunicationError, match=allowed):
            ringdp.init(transport="peer-host", timeout=CALL_TIMEOUT)


def test_peer_without_a_gpu_is_refused():
    with pytest.raises(ringdp.UsageError, match=r"'peer' needs a CUDA device, .*'peer-host'"):
        ringdp.init(transport="peer")
