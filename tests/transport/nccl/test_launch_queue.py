"""Communicators of one device launch in call order, and fail or end independently."""

from __future__ import annotations

import threading
import weakref
from functools import partial

import pytest
import torch

from ringdp import Communicator
from ringdp.transport.base import FailureKind
from ringdp.transport.device import in_flight
from ringdp.transport.device.launch_queue import launches, leave
from ringdp.transport.device.streams import Streams
from ringdp.transport.threads import Queue
from tests.comm.failing import catch
from tests.ranks import on_ranks
from tests.transport.nccl.behind import SpiedComm
from tests.transport.nccl.faults import NONE, STALL, fault, only_with_host_nccl
from tests.waiting import wait_until

only_with_host_nccl()
pytestmark = pytest.mark.process


def test_a_device_has_one_queue():
    one = launches(torch.device("cuda", 0))
    assert one is launches(torch.device("cuda", 0))
    assert one is not launches(torch.device("cuda", 1))


def test_jobs_run_in_order_and_an_error_does_not_stop_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_value))
    queue, done, ran = Queue("test"), threading.Event(), list[int]()
    error = RuntimeError("of one job")

    def fail() -> None:
        raise error

    for job in (lambda: ran.append(1), fail, lambda: ran.append(2), done.set):
        queue.put(job)
    assert done.wait(60)
    assert ran == [1, 2]
    assert shown == [error]
    queue.end()


def test_a_job_that_raises_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    queue, x = Queue("test"), torch.ones(3)
    reference = weakref.ref(x)

    def fail(kept: torch.Tensor) -> None:
        raise RuntimeError(f"of one job, which holds {len(kept)} elements")

    queue.put(partial(fail, x))
    del x
    wait_until(lambda: reference() is None)
    queue.end()


@on_ranks(2, pool="over_nccl")
def test_a_hanging_abort_gives_the_device_a_new_queue(comm: Communicator) -> None:
    """As on a GPU whose abort hangs."""
    device, another = torch.device("cuda", 0), torch.device("cuda", 1)
    elsewhere = launches(another)
    other, before, passed = comm.duplicate(), launches(device), threading.Event()
    launched, spied = threading.Event(), SpiedComm(other)
    spied.abort = passed.wait  # type: ignore[method-assign]
    other._transport._jobs.put(launched.wait)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "PATIENCE", 0.1)
        other.all_reduce(torch.ones(3), async_op=True)
        comm.barrier()  # otherwise the other rank could see the failure before its call
        other._transport.device = device
        other._transport.fail(FailureKind.ABORTED, comm.rank)
        wait_until(lambda: launches(device) is not before)
    assert launches(another) is elsewhere
    for event in (passed, launched):
        event.set()
    for queue in (before, launches(device)):
        queue.end()
    leave(device)


@on_ranks(2, pool="over_nccl")
def test_a_collective_in_the_queue_counts_as_begun(comm: Communicator) -> None:
    """A collective of the CPU ends while one of the device waits in the queue."""
    queue, passed, end = Queue("test"), threading.Event(), comm._transport
    end._launches, device = queue, end.device
    first = end.record(comm.rank).finished
    queue.put(passed.wait)
    work = comm.all_reduce(torch.ones(3), async_op=True)
    end.device = torch.device("meta")  # now collectives of the CPU need not wait for it
    comm.all_reduce(torch.ones(3))
    end.device = device
    assert end.record(comm.rank)[1:3] == (first + 1, first)  # begun, finished
    passed.set()
    work.wait()
    queue.end()


class WatchedStreams(Streams):
    def __init__(self) -> None:
        self.may, self.issued = set[int](), set[int]()

    def watch(self) -> None:
        self.may.add(threading.get_ident())

    def follow(self, arrival: object) -> None:
        self.issued.add(threading.get_ident())


@on_ranks(2, pool="over_nccl")
def test_launch_threads_may_allocate_during_a_users_capture(
    comm: Communicator,
) -> None:
    streams = WatchedStreams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "streams", lambda _: streams)
        with comm.duplicate() as other:
            other.all_reduce(torch.ones(3))
    assert streams.issued
    assert streams.issued < streams.may  # and the watching thread may, too


@on_ranks(2, pool="over_nccl")
def test_a_failed_or_closed_communicator_does_not_delay_others(comm: Communicator) -> None:
    """The communicators share a queue, as those of one GPU do."""
    queue, other, closed = Queue("test"), comm.duplicate(), comm.duplicate()
    for c in (comm, other, closed):
        c._transport._launches = queue
    xs = [torch.ones(5000) for _ in range(9)]
    turns = zip(3 * [comm, other, closed], xs, strict=True)
    works = [c.all_reduce(x, async_op=True) for c, x in turns]
    for work, x in zip(reversed(works), reversed(xs), strict=True):
        work.wait()
        assert torch.all(x == comm.size)
    comm.barrier()
    closed.close()
    if comm.rank == 1:
        fault(STALL, launches=1)  # the stamp is still sent
    caught = catch(other, lambda: other.all_reduce(xs[0], async_op=True).wait(0.5))
    assert caught is not None
    assert caught.error == "CollectiveTimeout"
    fault(NONE)  # the launch may not have happened, if the other rank was late before
    comm.all_reduce(x := torch.ones(3))
    assert torch.all(x == comm.size)
    queue.end()
