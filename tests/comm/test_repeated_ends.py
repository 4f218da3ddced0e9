"""Repeated calls that do not just end: in the background, differing, late, lost, refused."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringdp import Communicator, PeerLost, UsageError
from ringdp.comm import job
from ringdp.comm.call import place
from ringdp.transport.base import Exchange
from tests.comm.failing import Caught, catch, fallible, until_failed
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize("n", [2, 4])
@on_ranks()
def test_repeated_calls_in_the_background(comm: Communicator) -> None:
    """Several at once; nobody but the transport holds what one of them works on."""
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


@pytest.mark.parametrize("n", [2, 4])
@on_ranks()
def test_other_threads_go_on_while_a_brief_call_waits(comm: Communicator) -> None:
    """Which does not give the GIL away at first: not where it spins, nor, with more ranks than
    cores, where it yields."""
    x, over, ticks = torch.ones(8), threading.Event(), list[float]()

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.monotonic())

    for _ in range(2):  # the second call is a repeated one
        comm.all_reduce(x)
    thread = threading.Thread(target=tick)
    thread.start()
    comm.barrier()
    if comm.rank:
        time.sleep(0.3)
    since = time.monotonic()
    comm.all_reduce(x)
    until = time.monotonic()
    over.set()
    thread.join()
    if comm.rank == 0:
        assert sum(since < t < until for t in ticks) > 10


BY = {"direct": "", "ring": ", by ring"}
BOTH_WAYS = pytest.mark.parametrize("algorithm", ["direct", "ring"])  # an exchange, and a program


@fallible
def differing(comm: Communicator, algorithm: str) -> tuple[Caught | None, str, int]:
    x = torch.ones(8)
    calls = [
        lambda: comm.all_reduce(x, algorithm=algorithm),
        lambda: comm.all_reduce(x, "max", algorithm=algorithm),
    ]
    for call in calls:  # both have been made before
        call()
    number = comm.issued
    return catch(comm, calls[comm.rank]), place(comm._ready.site()), number  # type: ignore[union-attr]


@BOTH_WAYS
def test_ranks_that_repeat_different_calls_are_told_both(ranks, algorithm: str):
    for caught, here, number in ranks(2)(differing, algorithm):
        assert caught.error == caught.again == "CollectiveMismatch"
        for op in ("sum", "max"):
            assert f"all_reduce #{number} (float32, {op}{BY[algorithm]}) of 8" in caught.text
        assert caught.text.count(here.rpartition(":")[0]) >= 2


@fallible
def alone(comm: Communicator, algorithm: str, later: bool) -> Caught | None:
    x = torch.ones(8)
    comm.all_reduce(x, algorithm=algorithm)
    if comm.rank == 0:
        comm.set_timeout(0.3)
    else:  # until rank 0 has given up
        while comm._transport.failure() is None:
            time.sleep(0.01)
    return catch(comm, lambda: comm.all_reduce(x, algorithm=algorithm, async_op=later).wait())


@BOTH_WAYS
@pytest.mark.parametrize("later", [False, True])
def test_a_repeated_call_times_out(ranks, algorithm: str, later: bool):
    caught, _ = ranks(2)(alone, algorithm, later)
    assert caught.error == caught.again == "CollectiveTimeout"
    what = f"all_reduce #2 (float32, sum{BY[algorithm]}) of 8 elements"
    assert f"rank 0 waited for {what}" in caught.text
    assert f"{os.path.basename(__file__)}:" in caught.text


@fallible
def waits(comm: Communicator, before: int) -> list[float]:
    """For how long a call waits after what it has waited in C++."""
    x = torch.ones(8)
    for _ in range(before):
        comm.all_reduce(x, tag=1)
    comm.set_timeout(0.05)  # less than what Ctrl-C is looked for once
    if comm.rank == 1:
        until_failed(comm)
    transport: Any = comm._transport
    seen, wait = [], transport.wait
    transport.wait = lambda ticket, seconds: seen.append(seconds) or wait(ticket, seconds)
    assert catch(comm, lambda: comm.all_reduce(x, tag=1)).error == "CollectiveTimeout"  # type: ignore[union-attr]
    del transport.wait
    return seen


@pytest.mark.parametrize("before", [0, 1])
def test_a_timeout_counts_from_the_start_of_the_call(ranks, before: int):
    assert ranks(2)(waits, before)[0][0] == 0


@fallible
def kept_after_a_failure(comm: Communicator, algorithm: str) -> int:
    comm.all_reduce(torch.ones(8), algorithm=algorithm)
    if comm.rank == 1:
        comm.close()
        return 0
    for _ in range(10):
        with pytest.raises(PeerLost):
            comm.all_reduce(torch.ones(8), algorithm=algorithm)
    return len(comm._transport.kept)


@BOTH_WAYS
def test_retries_after_a_failure_keep_nothing(ranks, algorithm: str):
    assert ranks(2)(kept_after_a_failure, algorithm)[0] <= 1  # what failed may still be read


@BOTH_WAYS
@on_ranks(2)
def test_a_call_keeps_the_memory_that_it_began_with(comm: Communicator, algorithm: str) -> None:
    """The tensor gets other memory while the call is under way, and others get its."""
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
def test_calls_by_finalizers_while_all_are_forgotten(comm: Communicator) -> None:
    """Calls by what goes when all are forgotten: finalizers of algorithms."""
    if comm._ready is None:
        pytest.skip("an older torch")
    x, most, ended = torch.ones(2), 4096, []

    class Last:
        def __del__(self) -> None:
            for tag in range(0, most, 512):
                comm.all_reduce(x, tag=tag)
            ended.append(tag)

    def made() -> Callable[[int], Any]:
        last = Last()
        return lambda n: last

    like = comm._transport.prepare(Exchange("all_reduce", (0, 2), x.dtype, "sum", 0))
    for tag in range(most + 1):
        comm._ready.remember(0, 0, 2, "sum", 0, tag, made(), like)
        comm._ready.remember(0, 0, 2, "sum", 0, tag, "direct", like)
    assert len(ended) > most // 4


@on_ranks(2)
def test_a_call_that_is_refused_late_does_not_count(comm: Communicator) -> None:
    """By the transport, when nothing has begun: the call does not count."""
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
def test_a_call_that_ctrl_c_prevents_does_not_count(comm: Communicator) -> None:
    """By Ctrl-C, which Python raises at the end of a call to C: the clock is asked last."""
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
