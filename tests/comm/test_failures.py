"""Communicators that end while others use them, in processes that go on: and nothing stays."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import ringdp
from ringdp import CommunicationError, Communicator
from tests.comm.failing import Heard, fallible, hear, held

pytestmark = pytest.mark.process


@fallible
def closes(comm: Communicator) -> Heard | None:
    if comm.rank == 1:
        comm.close()
        comm.close()
        with pytest.raises(CommunicationError, match="closed"):
            comm.barrier()
        return None
    return hear(comm, comm.barrier)


def test_a_rank_that_closes_is_lost_to_the_others(ranks):
    for heard in ranks(3)(closes):
        if heard:
            assert heard.error == heard.again == "PeerLost"
            assert "rank 1 has ended" in heard.text
            assert heard.seconds < 2.0


@fallible
def pending_close(comm: Communicator) -> float:
    start = time.monotonic()
    if comm.rank == 0:
        works = [comm.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
        comm.close()
        for work in works:  # the first runs, the others wait in line: neither may wait on
            with pytest.raises(CommunicationError, match="closed"):
                work.wait()
            assert work.is_completed()
            assert isinstance(work.exception(), CommunicationError)
    return time.monotonic() - start


def test_close_ends_what_is_pending(ranks):
    assert max(ranks(2)(pending_close)) < 2.0


@fallible
def buffers_outlive_errors(comm: Communicator) -> None:
    """The tensor of a collective that timed out is not reused while the thread may write to it."""
    if comm.rank == 1:
        time.sleep(0.3)
    for _ in range(20):
        with pytest.raises(CommunicationError):
            comm.all_reduce(torch.ones(100_000), async_op=True).wait(timeout=0.001)
        x = torch.full((100_000,), 3.0)
        time.sleep(0.001)
        assert torch.all(x == 3.0)


def test_a_timed_out_buffer_is_not_freed_under_the_thread(ranks):
    ranks(2)(buffers_outlive_errors)


@fallible
def interrupted(comm: Communicator) -> float:
    if comm.rank == 1:
        time.sleep(1.5)
        return 0.0
    # A job in the background of a shell without job control starts with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        comm.barrier()
    return time.monotonic() - start


def test_ctrl_c_ends_a_wait(ranks):
    assert ranks(2)(interrupted)[0] < 0.8


@fallible
def forked(comm: Communicator) -> tuple[int, bool]:
    """A child, as of a data loader: it is refused, and its exit harms nobody. It has the arena,
    where tensors of its own may lie, but not the segment that ranks talk through."""
    pid = os.fork()
    if pid == 0:
        maps = Path("/proc/self/maps").read_text()
        try:
            comm.barrier()
        except ringdp.UsageError:
            comm.close()
            os._exit(int("memfd:ringdp " in maps))
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    comm.barrier()
    return status, "memfd:ringdp " in Path("/proc/self/maps").read_text()


def test_a_forked_child_is_no_rank(ranks):
    assert ranks(2)(forked) == [(0, True)] * 2


def leaves(comm: Communicator) -> None:
    """A rank closes right after its last collective, while the others may still be reading."""
    before = held()
    for i in range(150):
        with comm.duplicate() as other:
            x = torch.ones(1 if i % 3 else 300_000)
            other.all_reduce(x, algorithm="ring" if i % 2 else "direct")
            assert torch.all(x == comm.size)
    del other
    assert held() == before


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_may_leave_right_after_its_last_collective(ranks, n):
    ranks(n)(leaves)
