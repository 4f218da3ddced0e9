"""Repeated calls that run in the background, mismatch, time out, are lost, interrupted or
refused."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringdp import CommunicationError, Communicator, PeerLost, UsageError
from ringdp.comm import job
from ringdp.comm.call import place
from ringdp.transport.base import Exchange
from ringdp.transport.records import call_site
from tests.comm.failing import catch, fallible, until_failed
from tests.ranks import on_ranks
from tests.waiting import wait_until

pytestmark = pytest.mark.process


@pytest.mark.parametrize("n", [2, 4])
@on_ranks()
def test_repeated_calls_can_run_in_the_background(comm: Communicator) -> None:
    """Several at once; only the transport keeps their tensors alive."""
    x, lengths = torch.ones(4), (4, 1 << 10, 1 << 18)
    for _ in range(3):
        works, kept = [], []
        for length in lengths:
            works.append(comm.all_reduce(torch.ones(length), async_op=True))
            kept.append(torch.full((length,), comm.rank + 1.0))
            works.append(comm.all_reduce(kept[-1], "max", async_op=True, tag=1))
        comm.all_reduce(x.fill_(1))
        assert x.tolist() == [comm.size] * 4
        for work in works:
            work.wait()
            assert work.is_completed()
        assert all(bool((y == comm.size).all()) for y in kept)
    assert not comm._transport.kept


@on_ranks(2)
def test_repeated_calls_of_a_closed_communicator_are_refused(comm: Communicator) -> None:
    x = torch.ones(4)
    other = comm.duplicate()
    other.all_reduce(x)
    other.close()
    for later in (False, True):
        with pytest.raises(CommunicationError, match="all_reduce on a communicator that has been"):
            other.all_reduce(x, async_op=later)


@pytest.mark.parametrize("n", [2, 4])
@on_ranks()
def test_other_threads_run_while_a_brief_call_waits(comm: Communicator) -> None:
    """A brief call keeps the GIL at first, while it spins and, with more ranks than cores, while it
    yields."""
    x, record = torch.ones(8), comm._transport.record
    for _ in range(2):  # the second call is a repeated one
        comm.all_reduce(x)
    with comm.duplicate() as other:
        before = record(comm.rank).begun  # after `duplicate`, which is a call, too

        def tick() -> None:
            while record(0).begun == before:
                time.sleep(0.001)
            for _ in range(10):
                time.sleep(0.001)
            other.barrier()

        thread = threading.Thread(target=tick)
        if comm.rank == 0:
            thread.start()
        try:
            if comm.rank:  # end rank 0's call once its thread has run during it
                wait_until(other.barrier(async_op=True).is_completed)
        finally:
            comm.all_reduce(x)
        if comm.rank == 0:
            thread.join()


BY = {"direct": "", "ring": ", by ring"}
by_exchange_and_program = pytest.mark.parametrize(
    "algorithm", ["direct", "ring"]
)  # an exchange and a program


@by_exchange_and_program
@on_ranks(2)
@fallible
def test_repeated_calls_that_differ_are_a_mismatch(comm: Communicator, algorithm: str) -> None:
    x = torch.ones(8)
    calls = [
        lambda: comm.all_reduce(x, algorithm=algorithm),
        lambda: comm.all_reduce(x, "max", algorithm=algorithm),
    ]
    for call in calls:  # both have been called before
        call()
    number = comm.issued
    caught = catch(comm, calls[comm.rank])
    assert caught.error == caught.again == "CollectiveMismatch"
    for op in ("sum", "max"):
        assert f"all_reduce #{number} (float32, {op}{BY[algorithm]}) of 8" in caught.text
    assert caught.text.count(place(call_site()).rpartition(":")[0]) >= 2


@by_exchange_and_program
@pytest.mark.parametrize("later", [False, True])
@on_ranks(2)
@fallible
def test_a_repeated_call_times_out(comm: Communicator, algorithm: str, later: bool) -> None:
    x = torch.ones(8)
    comm.all_reduce(x, algorithm=algorithm)
    if comm.rank == 0:
        comm.set_timeout(0.3)
    else:
        until_failed(comm)
    caught = catch(comm, lambda: comm.all_reduce(x, algorithm=algorithm, async_op=later).wait())
    assert caught.error == caught.again == "CollectiveTimeout"
    what = f"all_reduce #2 (float32, sum{BY[algorithm]}) of 8 elements"
    assert comm.rank or f"rank 0 waited for {what}" in caught.text
    assert f"{os.path.basename(__file__)}:" in caught.text


@pytest.mark.parametrize("before", [0, 1])
@on_ranks(2)
@fallible
def test_a_timeout_counts_from_the_start_of_the_call(comm: Communicator, before: int) -> None:
    """After its wait in C++ a call does not wait any more in Python."""
    x = torch.ones(8)
    for _ in range(before):
        comm.all_reduce(x, tag=1)
    comm.set_timeout(0.05)  # shorter than the interval at which signals are checked
    if comm.rank == 1:
        until_failed(comm)
    transport: Any = comm._transport
    seen, wait = [], transport.wait
    transport.wait = lambda ticket, seconds: seen.append(seconds) or wait(ticket, seconds)
    assert catch(comm, lambda: comm.all_reduce(x, tag=1)).error == "CollectiveTimeout"  # type: ignore[union-attr]
    del transport.wait
    assert comm.rank or seen[0] == 0


@by_exchange_and_program
@on_ranks(2)
@fallible
def test_retries_after_a_failure_keep_no_buffers(comm: Communicator, algorithm: str) -> None:
    comm.all_reduce(torch.ones(8), algorithm=algorithm)
    if comm.rank == 1:
        comm.close()
        return
    for _ in range(10):
        with pytest.raises(PeerLost):
            comm.all_reduce(torch.ones(8), algorithm=algorithm)
    assert len(comm._transport.kept) <= 1  # that of the first failed call may still be read


@by_exchange_and_program
@on_ranks(2)
def test_a_call_keeps_its_original_memory_alive(comm: Communicator, algorithm: str) -> None:
    """The tensor gets other memory during the call, and other tensors may get its old memory."""
    with comm.duplicate() as other:
        x = torch.ones(200_000)
        for _ in range(2):
            other.all_reduce(x, algorithm=algorithm)
        if comm.rank == 0:
            work = other.all_reduce(x, algorithm=algorithm, async_op=True)
            x.data = torch.empty(0)
        others = [torch.full((200_000,), 7.0) for _ in range(4)]
        comm.barrier()
        if comm.rank == 1:
            work = other.all_reduce(x, algorithm=algorithm, async_op=True)
        work.wait()
        assert all(bool((y == 7).all()) for y in others)


@on_ranks(1)
def test_finalizers_may_make_calls_while_the_cache_is_cleared(comm: Communicator) -> None:
    """Finalizers of algorithms make calls while the cache is cleared."""
    x, most, ended = torch.ones(2), 4096, []

    class Last:
        def __del__(self) -> None:
            for tag in range(0, most, 512):
                comm.all_reduce(x, tag=tag)
            ended.append(tag)

    def algorithm_with_finalizer() -> Callable[[int], Any]:
        last = Last()
        return lambda n: last

    like = comm._transport.prepare(Exchange("all_reduce", (0, 2), x.dtype, "sum", 0))
    for tag in range(most + 1):
        comm._ready.remember(0, 0, 2, "sum", 0, tag, algorithm_with_finalizer(), (), like)
        comm._ready.remember(0, 0, 2, "sum", 0, tag, "direct", (), like)
    assert len(ended) > most // 4


@on_ranks(2)
def test_a_call_that_the_transport_refuses_does_not_count(comm: Communicator) -> None:
    """The transport refuses the call before anything has begun; it takes no number."""
    transport: Any = comm._transport
    prepare, before = transport.prepare, comm.issued

    def refuse(*_: object) -> int:
        raise UsageError("not now")

    transport.prepare = lambda what: SimpleNamespace(run=refuse, start=refuse)
    with pytest.raises(UsageError, match="not now"):
        comm.all_gather_v(torch.ones(6), torch.ones(3), [3, 3], algorithm="ring")
    transport.prepare = prepare
    assert comm.issued == before
    comm.barrier()


@on_ranks(2)
def test_a_call_interrupted_before_it_begins_does_not_count(comm: Communicator) -> None:
    """Python raises Ctrl-C when a call of C returns; reading the clock is the last one before the
    call begins."""
    clock = job.time

    def interrupted() -> float:
        raise KeyboardInterrupt

    before = comm.issued
    job.time = SimpleNamespace(monotonic=interrupted)  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(torch.ones(3), scale=2.0)
    finally:
        job.time = clock
    assert comm.issued == before
    comm.barrier()
