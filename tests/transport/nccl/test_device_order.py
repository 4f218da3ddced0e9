"""What the NCCL transport does while a device is behind: on the host, with streams that say so."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from ringdp.transport.base import FailureKind
from ringdp.transport.device.streams import CudaStreams, End, Streams
from ringdp.transport.nccl import transport as transport_module
from ringdp.transport.store.failures import LOOK
from tests.ranks import on_ranks
from tests.transport.nccl.behind import BehindStreams, Spied, behind
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.nccl.racing import faked

only_with_host_nccl()
pytestmark = pytest.mark.process


def barriers(comm: Communicator) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:  # the host hears of it when the stamps have come
        comm.barrier()


@on_ranks(2, pool="over_nccl")
def test_ranks_that_disagree_hear_it_though_the_device_never_ends(comm: Communicator) -> None:
    behind(comm)
    spied = Spied(comm)
    comm.all_reduce(torch.ones(4), "sum" if comm.rank else "max", async_op=True)
    with pytest.raises(CollectiveMismatch, match="all_reduce"):
        barriers(comm)
    assert spied.aborted.wait(60)  # which ends what hangs on the device, and whoever waits there


@pytest.mark.parametrize("mistaken", [False, True])
@on_ranks(2, pool="over_nccl")
def test_a_barrier_comes_behind_what_the_device_does(comm: Communicator, mistaken: bool) -> None:
    transport, streams, x = comm._transport, behind(comm), torch.ones(4)
    comm.all_reduce(x, "max" if mistaken and comm.rank else "sum", async_op=True)
    transport.device = torch.device("cuda", 0)  # which makes of CPU tensors the host's business
    if mistaken:
        with pytest.raises(CollectiveMismatch, match=r"all_reduce #0 \(float32, max\)"):
            comm.barrier()
        return
    message = comm.irecv(torch.empty(1), 1 - comm.rank)  # which is not waited for
    coming = threading.Thread(target=comm.barrier)
    coming.start()
    coming.join(4 * LOOK)
    assert coming.is_alive()
    streams.ended.set()
    coming.join(60)
    assert not coming.is_alive()
    comm.send(torch.ones(1), 1 - comm.rank)
    message.wait()


@on_ranks(2, pool="over_nccl")
def test_a_barrier_in_a_forked_child_is_an_error(comm: Communicator) -> None:
    comm.barrier()
    told, tell = os.pipe()
    if not (child := os.fork()):
        try:
            comm.barrier()
        except ringdp.UsageError as e:
            os.write(tell, str(e).encode())
        os._exit(0)
    os.close(tell)
    try:
        assert select.select([told], [], [], 60)[0]  # it has said something, or ended
        assert b"forked from it" in os.read(told, 1000)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)


class Twice:
    """The end of what passes between two questions: it is not there at the first two."""

    def __init__(self) -> None:
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 2


class PassingStreams(BehindStreams):
    """A device that has met and ended when it is asked for the end, not when asked for stamps."""

    def end(self) -> End:
        self._ends += 1
        return Twice() if self._ends % 2 else super(BehindStreams, self).end()


@on_ranks(2, pool="over_nccl")
def test_stamps_are_compared_though_the_end_is_seen_before_them(comm: Communicator) -> None:
    comm._transport._streams = PassingStreams()
    comm.all_reduce(torch.ones(4), "sum" if comm.rank else "max", async_op=True)
    with pytest.raises(CollectiveMismatch, match="all_reduce"):
        barriers(comm)


@on_ranks(2, pool="over_nccl")
def test_what_does_not_end_on_the_device_in_time_is_aborted(comm: Communicator) -> None:
    behind(comm)
    spied = Spied(comm)
    comm.set_timeout(0.3)
    comm.all_reduce(torch.ones(4), async_op=True)
    assert spied.aborted.wait(60)
    with pytest.raises(CollectiveTimeout):
        comm.barrier()


class Broken(Streams):
    """A device whose memory is misused: who asks for an end again hears of it."""

    def __init__(self) -> None:
        self._asked = False

    def end(self) -> End:
        return self

    def query(self) -> bool:
        asked, self._asked = self._asked, True
        if not asked:
            return False
        raise torch.AcceleratorError("CUDA error: an illegal address\nSearch for it in CUDA's docs")


@on_ranks(2, pool="over_nccl")
def test_what_the_driver_says_is_a_failure_that_all_hear_of(comm: Communicator) -> None:
    if comm.rank == 0:
        comm._transport._streams = Broken()
    with pytest.raises(PeerLost, match=r"rank 0 has aborted \(CUDA error: an illegal address\)"):
        barriers(comm)


@on_ranks(2, pool="over_nccl")
def test_what_is_queued_when_a_communicator_fails_is_not_begun(comm: Communicator) -> None:
    """On a communicator that fails before the queue comes to it."""
    other = comm.duplicate()
    spied, transport = Spied(other), other._transport
    failed, passed = threading.Event(), threading.Event()
    transport._jobs.put(failed.wait)
    work = other.all_reduce(torch.ones(4), async_op=True)
    comm.barrier()  # else the first rank's failure would be heard before the other's call
    transport.fail(FailureKind.ABORTED, comm.rank)
    failed.set()
    transport._jobs.put(passed.set)
    assert passed.wait(60)
    assert not {"send", "recv"} & set(spied.calls)
    with pytest.raises(PeerLost):
        work.wait()


class Asked(Streams):
    def __init__(self) -> None:
        self.asked = list[str]()

    def drain(self) -> None:
        self.asked.append("drain")


@on_ranks(2, pool="over_nccl")
def test_a_larger_staging_waits_for_no_device(comm: Communicator) -> None:
    streams = comm._transport._streams = Asked()
    for elements in (5, 50_000, 500_000):
        comm.all_reduce(x := torch.ones(elements), algorithm="direct")
        assert torch.all(x == comm.size)
    assert not streams.asked  # the device may hang


@on_ranks(2, pool="over_nccl")
def test_a_buffer_is_let_go_of_once_it_was_waited_for(comm: Communicator) -> None:
    """Not when the watching thread sees the end: until then a step would keep all its buckets."""
    streams = behind(comm)
    x = torch.ones(4)
    gone = weakref.ref(x)
    work = comm.all_reduce(x, async_op=True)
    work.wait()
    del x, work
    until = time.monotonic() + 60
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None
    streams.ended.set()


@on_ranks(2, pool="over_nccl")
def test_a_capture_waits_until_the_end_of_the_last_collective_was_seen(comm: Communicator) -> None:
    streams, transport = behind(comm), comm._transport
    x = torch.ones(4)
    comm.all_reduce(x)
    streams.captures = True
    with pytest.raises(ringdp.UsageError, match="collectives under way"):
        comm.all_reduce(x)
    assert len(transport._under_way) == 1
    streams.ended.set()  # as after torch.cuda.synchronize(), which the watching thread sees late
    comm.all_reduce(x)
    assert torch.all(x == comm.size**2)
    assert not transport._open
    streams.captures = False
    comm.all_reduce(x)


def test_whether_a_graph_is_captured_is_asked_of_the_communicators_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faked(monkeypatch)
    one, current = torch.device("cuda:1"), [torch.device("cuda:0")]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == one)
    assert CudaStreams(one).capturing()


@on_ranks(2, pool="over_nccl")
def test_the_staging_of_a_graph_is_kept_for_its_replays(comm: Communicator) -> None:
    streams, transport = behind(comm), comm._transport
    streams.ended.set()
    x = torch.ones(4)
    comm.all_reduce(x, algorithm="direct")
    graphs = weakref.ref(transport._staging)
    streams.captures = True
    comm.all_reduce(x, algorithm="direct")
    streams.captures = False
    comm.all_reduce(torch.ones(50_000), algorithm="direct")
    assert len(transport._staging) > 50_000
    assert graphs() is not None, "a replay would write into what others have by then"


@on_ranks(2, pool="over_nccl")
def test_a_barrier_is_met_on_the_host(comm: Communicator) -> None:
    """With a transport whose tensors are elsewhere: what is launched there is not waited for."""
    transport = comm._connect("met", comm._ranks, comm._transport, None)
    transport.device = torch.device("meta")
    other = Communicator(
        lambda *_: transport, comm._ranks, name="met", timeout=60.0, warn_after=60.0
    )
    spied = Spied(other)
    other.barrier()
    assert not {"send", "recv"} & set(spied.calls)
    transport.device = torch.device("cpu")
    other.close()


class Held(Spied):
    """Whose sends take until they are let go."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.sends, self.goes_on = threading.Event(), threading.Event()

    def send(self, *where: int) -> None:
        self.sends.set()
        self.goes_on.wait(60)
        self._comm.send(*where)


@on_ranks(2, pool="over_nccl")
def test_an_abort_lets_a_launch_on_the_host_end(comm: Communicator) -> None:
    other = comm.duplicate()
    held, transport = Held(other), other._transport
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_module, "LAUNCH", 60.0)
        other.all_reduce(torch.ones(4), async_op=True)
        assert held.sends.wait(60)
        comm.barrier()
        transport.fail(FailureKind.ABORTED, comm.rank)
        assert not held.aborted.wait(3 * LOOK), "what is being launched uses what an abort frees"
        held.goes_on.set()
        assert held.aborted.wait(60)
