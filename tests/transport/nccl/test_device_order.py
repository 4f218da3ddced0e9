"""The NCCL transport while the device is behind the host, with stand-ins for streams."""

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
from tests.transport.nccl.behind import BehindStreams, SpiedComm, put_behind
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.nccl.racing import patch_torch
from tests.waiting import wait_until

only_with_host_nccl()
pytestmark = pytest.mark.process


def repeat_barriers(comm: Communicator) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:  # the mismatch is found once the stamps have arrived
        comm.barrier()


@on_ranks(2, pool="over_nccl")
def test_a_mismatch_is_raised_although_the_device_never_ends(comm: Communicator) -> None:
    put_behind(comm)
    spied = SpiedComm(comm)
    comm.all_reduce(torch.ones(4), "sum" if comm.rank else "max", async_op=True)
    with pytest.raises(CollectiveMismatch, match="all_reduce"):
        repeat_barriers(comm)
    assert spied.aborted.wait(60)  # ends what hangs on the device, and all waits for it


@pytest.mark.parametrize("mistaken", [False, True])
@on_ranks(2, pool="over_nccl")
def test_a_barrier_waits_for_the_device(comm: Communicator, mistaken: bool) -> None:
    transport, streams, x = comm._transport, put_behind(comm), torch.ones(4)
    comm.all_reduce(x, "max" if mistaken and comm.rank else "sum", async_op=True)
    transport.device = torch.device("cuda", 0)  # now CPU tensors are handled on the host
    if mistaken:
        with pytest.raises(CollectiveMismatch, match=r"all_reduce #0 \(float32, max\)"):
            comm.barrier()
        return
    message = comm.irecv(torch.empty(1), 1 - comm.rank)  # never waited for here
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
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            comm.barrier()
        except ringdp.UsageError as e:
            os.write(writer, str(e).encode())
        os._exit(0)
    os.close(writer)
    try:
        assert select.select([reader], [], [], 60)[
            0
        ]  # the child has written a message, or has ended
        assert b"forked from it" in os.read(reader, 1000)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


class ReadyAtThirdQuery:
    """An event that completes between two queries: not at the first two, then it has."""

    def __init__(self) -> None:
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 2


class PassingStreams(BehindStreams):
    """A device whose stamps are not yet seen when the end of the collective is."""

    def end(self) -> End:
        self._ends += 1
        return ReadyAtThirdQuery() if self._ends % 2 else super(BehindStreams, self).end()


@on_ranks(2, pool="over_nccl")
def test_stamps_are_compared_although_the_end_is_seen_first(comm: Communicator) -> None:
    comm._transport._streams = PassingStreams()
    comm.all_reduce(torch.ones(4), "sum" if comm.rank else "max", async_op=True)
    with pytest.raises(CollectiveMismatch, match="all_reduce"):
        repeat_barriers(comm)


@on_ranks(2, pool="over_nccl")
def test_a_collective_that_exceeds_the_timeout_is_aborted(comm: Communicator) -> None:
    put_behind(comm)
    spied = SpiedComm(comm)
    comm.set_timeout(0.3)
    comm.all_reduce(torch.ones(4), async_op=True)
    assert spied.aborted.wait(60)
    with pytest.raises(CollectiveTimeout):
        comm.barrier()


class BrokenStreams(Streams):
    """A device on which memory was misused: the second query raises the driver's error."""

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
def test_a_driver_error_is_raised_on_all_ranks(comm: Communicator) -> None:
    if comm.rank == 0:
        comm._transport._streams = BrokenStreams()
    with pytest.raises(PeerLost, match=r"rank 0 has aborted \(CUDA error: an illegal address\)"):
        repeat_barriers(comm)


class WrongStreams(Streams):
    def end(self) -> End:
        raise TypeError("cannot compile the kernel\nat 12:4")


@on_ranks(2, pool="over_nccl")
def test_any_error_of_a_launch_is_raised_on_all_ranks(comm: Communicator) -> None:
    if comm.rank == 0:
        comm._transport._streams = WrongStreams()
    with pytest.raises(PeerLost, match=r"0 has aborted \(TypeError: cannot compile the kernel\)"):
        repeat_barriers(comm)


@on_ranks(2, pool="over_nccl")
def test_queued_calls_of_a_failed_communicator_are_not_launched(comm: Communicator) -> None:
    """The communicator fails before the launch thread comes to the call."""
    other = comm.duplicate()
    spied, transport = SpiedComm(other), other._transport
    failed, passed = threading.Event(), threading.Event()
    transport._jobs.put(failed.wait)
    work = other.all_reduce(torch.ones(4), async_op=True)
    comm.barrier()  # otherwise the other rank could see the failure before its call
    transport.fail(FailureKind.ABORTED, comm.rank)
    failed.set()
    transport._jobs.put(passed.set)
    assert passed.wait(60)
    assert not {"send", "recv"} & set(spied.calls)
    with pytest.raises(PeerLost):
        work.wait()


class DrainCounter(Streams):
    def __init__(self) -> None:
        self.asked = list[str]()

    def drain(self) -> None:
        self.asked.append("drain")


@on_ranks(2, pool="over_nccl")
def test_growing_the_staging_does_not_wait_for_the_device(comm: Communicator) -> None:
    streams = comm._transport._streams = DrainCounter()
    for elements in (5, 50_000, 500_000):
        comm.all_reduce(x := torch.ones(elements), algorithm="direct")
        assert torch.all(x == comm.size)
    assert not streams.asked  # the device may hang


@on_ranks(2, pool="over_nccl")
def test_a_buffer_is_released_once_its_work_was_waited_for(comm: Communicator) -> None:
    """Not only when the watching thread sees the end: a step would keep all its buckets until
    then."""
    streams = put_behind(comm)
    x = torch.ones(4)
    reference = weakref.ref(x)
    work = comm.all_reduce(x, async_op=True)
    work.wait()
    del x, work
    wait_until(lambda: reference() is None)
    streams.ended.set()


@on_ranks(2, pool="over_nccl")
def test_a_capture_requires_that_all_collectives_have_ended(comm: Communicator) -> None:
    streams, transport = put_behind(comm), comm._transport
    x = torch.ones(4)
    comm.all_reduce(x)
    streams.captures = True
    with pytest.raises(ringdp.UsageError, match="collectives under way"):
        comm.all_reduce(x)
    assert len(transport._under_way) == 1
    streams.ended.set()  # as after torch.cuda.synchronize(), which the watching thread may see late
    comm.all_reduce(x)
    assert torch.all(x == comm.size**2)
    assert not transport._open
    streams.captures = False
    comm.all_reduce(x)


def test_captures_are_detected_on_the_communicators_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch_torch(monkeypatch)
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
def test_the_staging_of_a_captured_graph_is_kept(comm: Communicator) -> None:
    streams, transport = put_behind(comm), comm._transport
    streams.ended.set()
    x = torch.ones(4)
    comm.all_reduce(x, algorithm="direct")
    graphs = weakref.ref(transport._staging)
    streams.captures = True
    comm.all_reduce(x, algorithm="direct")
    streams.captures = False
    comm.all_reduce(torch.ones(50_000), algorithm="direct")
    assert len(transport._staging) > 50_000
    assert graphs() is not None, "a replay would write to memory that was reused"


@on_ranks(2, pool="over_nccl")
def test_a_barrier_runs_on_the_host(comm: Communicator) -> None:
    """A barrier sends no data: the transport's tensors are elsewhere, and nothing launched is
    waited for."""
    transport = comm._connect("met", comm._ranks, comm.timeout, comm._transport)
    transport.device = torch.device("meta")
    other = Communicator(
        lambda *_: transport, comm._ranks, name="met", timeout=60.0, warn_after=60.0
    )
    spied = SpiedComm(other)
    other.barrier()
    assert not {"send", "recv"} & set(spied.calls)
    transport.device = torch.device("cpu")
    other.close()


class BlockedSends(SpiedComm):
    """Its sends block until `goes_on` is set."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.sends, self.goes_on = threading.Event(), threading.Event()

    def send(self, *where: int) -> None:
        self.sends.set()
        self.goes_on.wait(60)
        self._comm.send(*where)


@on_ranks(2, pool="over_nccl")
def test_an_abort_waits_for_a_launch_in_progress(comm: Communicator) -> None:
    other = comm.duplicate()
    held, transport = BlockedSends(other), other._transport
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_module, "LAUNCH", 60.0)
        other.all_reduce(torch.ones(4), async_op=True)
        assert held.sends.wait(60)
        comm.barrier()
        transport.fail(FailureKind.ABORTED, comm.rank)
        assert not held.aborted.wait(3 * LOOK), (
            "the launch in progress uses memory that an abort frees"
        )
        held.goes_on.set()
        assert held.aborted.wait(60)
