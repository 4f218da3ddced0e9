"""Works: waiting, polling and dropping them; collectives on several threads at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
import torch

from ringdp import CommunicationError, Communicator, PeerLost, Work
from ringdp.comm.call import fingerprint
from ringdp.comm.job import Job
from tests.comm.test_arithmetic import everyone, values
from tests.limits import address_space_limit
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def check_waits(comm: Communicator) -> None:
    tensors = [values(comm.rank, 2000 * i, seed=i) for i in range(12)]
    works = [comm.all_reduce(t, async_op=True) for t in tensors]
    for i in (11, 3, 3, 0, 7):  # out of order, and twice
        works[i].wait()
        assert works[i].is_completed()
        assert works[i].exception() is None
    assert all(w.is_completed() for w in works)  # collectives complete in the order of issue
    ended = comm.all_reduce(torch.ones(1))
    assert ended.is_completed()
    assert ended.exception() is None
    for i, t in enumerate(tensors):
        assert torch.equal(t, everyone(comm, 2000 * i, seed=i).sum(0))

    view = values(comm.rank, 300, 300).t()  # a copy is reduced; `wait` copies it back
    work = comm.all_reduce(view, async_op=True)
    while not work.is_completed():
        pass
    assert torch.equal(view, everyone(comm, 300, 300).sum(0).t())


def check_on_one_core(comm: Communicator) -> None:
    """A rank on one core runs a call itself while the others keep up, and does not wait for late
    ones."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        check_waits(comm)
        with comm.duplicate() as other:
            for i in range(6):
                late = i % comm.size == comm.rank
                lengths = (3, 40_000, 400_000)  # lines, a whole message, tiles
                tensors = [values(comm.rank, n, seed=i) for n in lengths]
                if late:
                    other.barrier()  # the others call it only after their collectives
                    time.sleep(0.002)  # longer than a call waits actively for others
                works = [comm.all_reduce(t, async_op=True) for t in tensors]
                if not late:
                    other.barrier()
                for work in works:
                    work.wait()
                for t in tensors:
                    assert torch.equal(t, everyone(comm, len(t), seed=i).sum(0))
    finally:
        os.sched_setaffinity(0, cores)


def check_dropped_works(comm: Communicator) -> None:
    """Buffers of works that were dropped are not reused while they are in use, nor kept longer."""
    for i in range(30):
        comm.all_reduce(torch.full((200_000,), float(comm.rank)), async_op=True)
        comm.all_reduce(values(comm.rank, 300, 300).t(), async_op=True)
        other = torch.full((200_000,), -7.0)
        for length in range(20):  # evicts chunk bounds from a cache, if it is small
            comm.all_reduce(torch.ones(length + 20 * i), async_op=True)
        assert torch.all(other == -7.0)
    comm.barrier()
    assert not comm._transport.kept


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("what", [check_waits, check_on_one_core, check_dropped_works])
def test_works_wait_poll_and_drop(ranks, n: int, what: Callable[[Communicator], None]):
    ranks(n)(what)


@on_ranks(1)
def test_polling_a_work_does_not_run_it(comm: Communicator) -> None:
    """In CPU seconds of a single rank, which never waits."""
    x, y, questions = torch.ones(8 << 20), torch.zeros(8 << 20), 0.0
    busy = time.process_time()
    for _ in range(4):
        work = comm.all_gather(y, x, async_op=True)
        began = time.thread_time()
        work.is_completed()
        questions += time.thread_time() - began
        work.wait()
    assert questions < (time.process_time() - busy) / 3


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Leaves no address space for another thread's stack."""
    over, threads = threading.Event(), []
    try:
        with address_space_limit(4 << 20):
            with suppress(RuntimeError):  # stacks of ended threads are reused until then
                while True:
                    threads.append(threading.Thread(target=over.wait))
                    threads[-1].start()
            yield
    finally:
        over.set()
        for thread in threads[:-1]:
            thread.join()


@on_ranks(2)
def test_works_complete_without_a_thread(comm: Communicator) -> None:
    """If no thread can be created, the waiting thread does the work."""
    peer = 1 - comm.rank
    with comm.duplicate() as other:  # has no thread yet
        x, y, z = values(comm.rank, 50_000), torch.ones(100_000), torch.zeros(100_000)
        other.send(x[:1], peer)  # now its message memory is mapped
        other.barrier()
        other.recv(x[:1].clone(), peer)
        with no_more_threads():
            for work in (
                other.all_reduce(x, async_op=True),
                other.isend(y, peer),
                other.irecv(z, peer),
            ):
                work.wait()
        assert torch.equal(x, everyone(comm, 50_000).sum(0))
        assert torch.equal(z, y)


@pytest.mark.parametrize("n", [2, 3])
@on_ranks()
def test_duplicates_run_concurrently(comm: Communicator) -> None:
    """A duplicate's collectives do not wait for the original's, in whatever order they are
    issued."""
    other = comm.duplicate()
    errors: list[BaseException] = []

    def run(on: Communicator, seed: int) -> None:
        try:
            for i in range(100):
                x = values(comm.rank, 37 * i, seed=seed)
                on.all_reduce(x)
                assert torch.equal(x, everyone(comm, 37 * i, seed=seed).sum(0))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(c, i)) for i, c in enumerate((comm, other))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors

    # opposite orders on the two ranks; with one queue this would be a mismatch or a hang
    few, many = torch.ones(3), torch.ones(400_000)
    issue = [(comm, few), (other, many)]
    works = [c.all_reduce(x, async_op=True) for c, x in issue[:: -1 if comm.rank else 1]]
    for w in works[::-1]:
        w.wait()
    assert torch.all(few == comm.size)
    assert torch.all(many == comm.size)
    third = other.duplicate()
    third.barrier()
    third.close()
    other.close()


@pytest.mark.parametrize("n", [2, 3])
@on_ranks()
def test_a_duplicates_call_of_equal_length_is_another(comm: Communicator) -> None:
    with comm.duplicate() as other:
        x, y = values(comm.rank, 50), values(comm.rank, 50, seed=1)
        w = other.all_reduce(y, async_op=True)
        comm.all_reduce(x)
        w.wait()
        assert torch.equal(x + y, (everyone(comm, 50) + everyone(comm, 50, seed=1)).sum(0))


class CompletedTransport:
    """A transport on which every call has completed, and its guard."""

    timeout = warn_after = 60.0

    @property
    def transport(self) -> CompletedTransport:
        return self

    def wait(self, ticket: int, seconds: float) -> bool:
        return True


def test_a_handler_can_wait_for_another_work_while_one_finishes():
    """As a signal handler or a finalizer may do."""
    done: list[str] = []
    guard, call = cast(Any, CompletedTransport()), cast(Any, None)
    other = Work(guard, call, 2, lambda: done.append("other"))

    def finish() -> None:
        other.wait()
        done.append("one")

    thread = threading.Thread(target=Work(guard, call, 1, finish).wait, daemon=True)
    thread.start()
    thread.join(20)
    assert done == ["other", "one"]


def test_a_handler_that_waits_for_the_finishing_work_is_refused():
    """Not that it is done: the caller would read a sum that is not divided yet."""
    messages: list[str] = []

    def finish() -> None:
        for call_it in (work.wait, work.is_completed):
            with pytest.raises(CommunicationError) as error:
                call_it()
            messages.append(str(error.value))

    call = (7, fingerprint("all_reduce", torch.float32, "avg", 0), 3, b"train.py:40")
    work = Work(cast(Any, CompletedTransport()), call, 1, finish)
    work.wait()
    work.wait()  # finishes only once
    assert len(messages) == 2
    for text in messages:
        assert "all_reduce #7 (float32, avg)" in text
        assert "allowed: to wait once that has returned" in text


def test_a_work_whose_finish_failed_is_not_done():
    ends = iter((ZeroDivisionError, KeyboardInterrupt, None))

    def finish() -> None:
        if error := next(ends):
            raise error

    work = Work(cast(Any, CompletedTransport()), cast(Any, None), 1, finish)
    with pytest.raises(ZeroDivisionError):
        work.wait()
    with pytest.raises(KeyboardInterrupt):
        work.is_completed()
    work.wait()
    assert next(ends, "none is left") == "none is left"


def test_a_wait_does_not_raise_a_failure_after_completion():
    """The call completes between the check for its end and the check for failures, one of a later
    call."""

    class Ends:
        looks, timeout = iter((False, True)), 60.0

        def wait(self, ticket: int, seconds: float) -> bool:
            return next(self.looks)

    class Fails:
        transport, warn_after = Ends(), 60.0

        def look(self, call: object) -> None:
            raise PeerLost

        def over(self, call: object) -> None:
            pass

    ended: list[bool] = []
    Work(cast(Any, Fails()), cast(Any, None), 1, lambda: ended.append(True)).wait()
    assert ended == [True]


class Stream:
    def __init__(self) -> None:
        self.waits_for = list[Stream]()

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)


def test_a_gpu_work_is_waited_for_in_every_stream(monkeypatch: pytest.MonkeyPatch):
    """Also by the second stream, which the transport does not know of."""

    gpu, first, second, third = torch.device("cuda", 0), Stream(), Stream(), Stream()
    work = Work(cast(Any, CompletedTransport()), cast(Any, None), 1, lambda: None, 0.0, gpu)
    for here in (first, first, second):
        monkeypatch.setattr(torch.cuda, "current_stream", {gpu: here}.__getitem__)
        work.wait()
    work._done = False  # as a thread may see it while another one finishes the work
    monkeypatch.setattr(torch.cuda, "current_stream", {gpu: third}.__getitem__)
    work.wait()
    assert (first.waits_for, second.waits_for, third.waits_for) == ([], [first], [first])


def test_finishing_on_a_gpu_records_the_buffers_on_its_stream(monkeypatch: pytest.MonkeyPatch):
    """The copy was made on the call's stream, whose memory could otherwise be reused at once."""

    class Buffer:
        device = torch.device("cuda", 0)

        def __init__(self) -> None:
            self.users = list[Stream]()
            self.record_stream = self.users.append

    here, done = Stream(), list[bool]()
    monkeypatch.setattr(torch.cuda, "current_stream", {Buffer.device: here}.__getitem__)
    whole, part = Buffer(), Buffer()
    buffers: Any = whole, part
    Job("reduce_scatter", (0, 1), *buffers, finish=lambda: done.append(True)).finish_on_gpu()
    assert (done, whole.users, part.users) == ([True], [here], [here])
