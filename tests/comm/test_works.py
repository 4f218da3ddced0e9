"""Works: waited for, asked for, dropped; collectives on several threads at once."""

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
from tests.comm.test_collectives import everyone, values
from tests.limits import address_space_limit
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def handles(comm: Communicator) -> None:
    tensors = [values(comm.rank, 2000 * i, seed=i) for i in range(12)]
    works = [comm.all_reduce(t, async_op=True) for t in tensors]
    for i in (11, 3, 3, 0, 7):  # out of order, and twice
        works[i].wait()
        assert works[i].is_completed()
        assert works[i].exception() is None
    assert all(w.is_completed() for w in works)  # they end in the order of issue
    for i, t in enumerate(tensors):
        assert torch.equal(t, everyone(comm, 2000 * i, seed=i).sum(0))

    view = values(comm.rank, 300, 300).t()  # a copy is reduced: it comes home with `wait`
    work = comm.all_reduce(view, async_op=True)
    while not work.is_completed():
        pass
    assert torch.equal(view, everyone(comm, 300, 300).sum(0).t())


def pinned(comm: Communicator) -> None:
    """A rank with one core runs a call itself while the others keep up, and waits for none."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        handles(comm)
        with comm.duplicate() as other:
            for i in range(6):
                late = i % comm.size == comm.rank
                lengths = (3, 40_000, 400_000)  # lines, a whole message, tiles
                tensors = [values(comm.rank, n, seed=i) for n in lengths]
                if late:
                    other.barrier()  # which the others come to only after their calls
                    time.sleep(0.002)  # longer than a call looks out for others
                works = [comm.all_reduce(t, async_op=True) for t in tensors]
                if not late:
                    other.barrier()
                for work in works:
                    work.wait()
                for t in tensors:
                    assert torch.equal(t, everyone(comm, len(t), seed=i).sum(0))
    finally:
        os.sched_setaffinity(0, cores)


def dropped(comm: Communicator) -> None:
    """Buffers of works that nobody holds are not given to others while they are in use."""
    for i in range(30):
        comm.all_reduce(torch.full((200_000,), float(comm.rank)), async_op=True)
        comm.all_reduce(values(comm.rank, 300, 300).t(), async_op=True)
        other = torch.full((200_000,), -7.0)
        for length in range(20):  # pushes chunk bounds out of a cache, if it is small
            comm.all_reduce(torch.ones(length + 20 * i), async_op=True)
        assert torch.all(other == -7.0)
    comm.barrier()


@on_ranks(2)
def test_memory_is_kept_no_longer_than_needed(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(10), async_op=True)
    comm.barrier()
    assert not comm._transport.kept


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("what", [handles, pinned, dropped])
def test_works(ranks, n: int, what: Callable[[Communicator], None]):
    ranks(n)(what)


def asked(comm: Communicator) -> tuple[float, float]:
    """Seconds of a core that a rank takes in all, and in questions right after its calls."""
    x, y, questions = torch.ones(8 << 20), torch.zeros(8 << 20), 0.0
    busy = time.process_time()
    for _ in range(4):
        work = comm.all_gather(y, x, async_op=True)
        began = time.thread_time()
        work.is_completed()
        questions += time.thread_time() - began
        work.wait()
    return time.process_time() - busy, questions


def test_to_ask_for_a_work_is_not_to_do_it(ranks):
    [(busy, questions)] = ranks(1)(asked)  # who is alone never waits
    assert questions < busy / 3


@contextmanager
def no_more_threads() -> Iterator[None]:
    """There is no room for the stack of another one."""
    over, threads = threading.Event(), []
    try:
        with address_space_limit(4 << 20):
            with suppress(
                RuntimeError
            ):  # until the stacks of threads that have ended are used again
                while True:
                    threads.append(threading.Thread(target=over.wait))
                    threads[-1].start()
            yield
    finally:
        over.set()
        for thread in threads[:-1]:
            thread.join()


@on_ranks(2)
def test_a_system_without_threads(comm: Communicator) -> None:
    """Where no thread can be had, who waits does the work."""
    peer = 1 - comm.rank
    with comm.duplicate() as other:  # which has no thread yet
        x, y, z = values(comm.rank, 50_000), torch.ones(100_000), torch.zeros(100_000)
        other.send(x[:1], peer)  # and now has its memory
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


def two_threads(comm: Communicator) -> None:
    """A duplicate's collectives don't wait for the original's, in whatever order they come."""
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

    # opposite orders on the two ranks: one queue would be a mismatch, or wait for ever
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


def same_lengths(comm: Communicator) -> None:
    with comm.duplicate() as other:
        x, y = values(comm.rank, 50), values(comm.rank, 50, seed=1)
        w = other.all_reduce(y, async_op=True)
        comm.all_reduce(x)
        w.wait()
        assert torch.equal(x + y, (everyone(comm, 50) + everyone(comm, 50, seed=1)).sum(0))


@pytest.mark.parametrize("n", [2, 3])
def test_duplicates_run_at_the_same_time(ranks, n: int):
    ranks(n)(same_lengths)
    ranks(n)(two_threads)


class Ended:
    """A transport on which every call has ended, and its guard."""

    timeout = warn_after = 60.0

    @property
    def transport(self) -> Ended:
        return self

    def wait(self, ticket: int, seconds: float) -> bool:
        return True


def test_a_handler_waits_for_another_work_while_one_is_brought_home():
    """As one of a signal may, or a finalizer."""
    done: list[str] = []
    guard, call = cast(Any, Ended()), cast(Any, None)
    other = Work(guard, call, 2, lambda: done.append("other"))

    def finish() -> None:
        other.wait()
        done.append("one")

    thread = threading.Thread(target=Work(guard, call, 1, finish).wait, daemon=True)
    thread.start()
    thread.join(20)
    assert done == ["other", "one"]


def test_a_handler_that_waits_for_the_work_brought_home_is_told_so():
    """Not that it is done: it would read a sum that is not divided yet."""
    said: list[str] = []

    def finish() -> None:
        for asked in (work.wait, work.is_completed):
            with pytest.raises(CommunicationError) as error:
                asked()
            said.append(str(error.value))

    call = (7, fingerprint("all_reduce", torch.float32, "avg", 0), 3, b"train.py:40")
    work = Work(cast(Any, Ended()), call, 1, finish)
    work.wait()
    work.wait()  # once
    assert len(said) == 2
    for text in said:
        assert "all_reduce #7 (float32, avg)" in text
        assert "allowed: to wait once that has returned" in text


def test_a_work_whose_result_did_not_come_home_is_not_done():
    ends = iter((ZeroDivisionError, KeyboardInterrupt, None))

    def finish() -> None:
        if error := next(ends):
            raise error

    work = Work(cast(Any, Ended()), cast(Any, None), 1, finish)
    with pytest.raises(ZeroDivisionError):
        work.wait()
    with pytest.raises(KeyboardInterrupt):
        work.is_completed()
    work.wait()
    assert next(ends, "none is left") == "none is left"


def test_a_wait_does_not_hear_of_what_failed_after_its_end():
    """The collective ends between a look at it and a look for failures, of a later call."""

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
        self.behind = list[Stream]()

    def wait_stream(self, other: Stream) -> None:
        self.behind.append(other)


def test_a_work_on_a_gpu_is_waited_for_in_every_stream(monkeypatch: pytest.MonkeyPatch):
    """By the second one, too, which the transport knows nothing of."""

    class Ended:
        timeout, warn_after = 60.0, 60.0
        wait = staticmethod(lambda ticket, seconds: True)
        transport = property(lambda self: self)

    gpu, first, second, third = torch.device("cuda", 0), Stream(), Stream(), Stream()
    work = Work(cast(Any, Ended()), cast(Any, None), 1, lambda: None, 0.0, gpu)
    for here in (first, first, second):
        monkeypatch.setattr(torch.cuda, "current_stream", {gpu: here}.__getitem__)
        work.wait()
    work._done = False  # as one thread may find it while another has brought the result home
    monkeypatch.setattr(torch.cuda, "current_stream", {gpu: third}.__getitem__)
    work.wait()
    assert (first.behind, second.behind, third.behind) == ([], [first], [first])


def test_what_a_gpu_brings_home_is_kept_for_the_stream_that_does(monkeypatch: pytest.MonkeyPatch):
    """A copy was made in the stream of the call, which may give its memory to others at once."""

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
