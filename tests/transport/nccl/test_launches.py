"""Communicators of one device launch in the order of the calls, and do not end with each other."""

from __future__ import annotations

import threading

import pytest
import torch

from ringdp import Communicator
from ringdp.transport.nccl.launches import Launches, launches
from tests.comm.failing import hear
from tests.transport.nccl.faults import STALL, fault, only_with_host_nccl
from tests.transport.nccl.test_transport import over_nccl

only_with_host_nccl()
pytestmark = pytest.mark.process


def test_a_device_has_one_queue():
    one = launches(torch.device("cuda", 0))
    assert one is launches(torch.device("cuda", 0))
    assert one is not launches(torch.device("cuda", 1))


def test_jobs_run_in_order_and_one_that_raises_ends_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_value))
    queue, done, ran = Launches(), threading.Event(), list[int]()
    error = RuntimeError("of one job")

    def fail() -> None:
        raise error

    for job in (lambda: ran.append(1), fail, lambda: ran.append(2), done.set):
        queue.put(job)
    assert done.wait(60)
    assert ran == [1, 2]
    assert shown == [error]
    queue.end()


@over_nccl
def shared(comm: Communicator) -> None:
    """As by communicators of one GPU."""
    queue, other, closed = Launches(), comm.duplicate(), comm.duplicate()
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
        fault(STALL, launches=1)  # its stamp still comes
    heard = hear(other, lambda: other.all_reduce(xs[0], async_op=True).wait(0.5))
    assert heard is not None
    assert heard.error == "CollectiveTimeout"
    comm.all_reduce(x := torch.ones(3))
    assert torch.all(x == comm.size)
    queue.end()


def test_a_communicator_that_fails_or_closes_holds_up_no_other(ranks) -> None:
    ranks(2)(shared)
