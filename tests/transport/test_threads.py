"""How threads wait and pass results on, with Ctrl-C possible at any step."""

from __future__ import annotations

import time
import weakref
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from threading import Event, Thread, get_ident

import pytest

from ringdp.transport import threads as module
from ringdp.transport.threads import (
    SPARE,
    WAITING,
    Answer,
    Bell,
    Living,
    Pool,
    _threads,
    at_exit,
    complete,
    join,
    spawn,
)
from tests.waiting import wait_until

SHORT = 0.01  # seconds


def test_a_bell_wakes_the_waiters_whose_condition_holds():
    bell, there = Bell(), list[int]()
    done = list[int]()

    def wait(number: int) -> None:
        bell.wait_for(lambda: number in there)
        done.append(number)

    threads = [Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for number in (1, 0, 2):
        there.append(number)
        bell.ring()
        threads[number].join()
    assert done == [1, 0, 2]


def test_a_wait_that_times_out_is_removed_from_the_bell():
    bell = Bell()
    bell.wait_for(lambda: False, SHORT)
    bell.wait_for(lambda: False, 0.0)
    assert not bell._waiting


def test_a_wait_ended_by_ctrl_c_does_not_block_others():
    bell, asked = Bell(), list[bool]()

    def interrupted() -> bool:
        asked.append(True)
        if len(asked) == 2:  # the second check is made when the bell counts it as waiting
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        bell.wait_for(interrupted)
    thread = Thread(target=bell.wait_for, args=(lambda: len(asked) > 2,))
    thread.start()
    asked.append(True)
    bell.ring()
    thread.join()
    assert not bell._waiting


def test_an_answer_gives_the_result_or_raises_the_error():
    found, failed = Answer[int](), Answer[int]()
    with pytest.raises(Empty):
        found.get(SHORT)
    found.find(lambda: 7)
    failed.find(lambda: 1 // 0)
    assert found.get(SHORT) == 7
    with pytest.raises(ZeroDivisionError):
        failed.get(SHORT)


def test_a_pool_runs_all_jobs_at_once_and_its_threads_again():
    pool, name = Pool("pooled"), "pooled"
    seen, go, many = SimpleQueue[int](), Event(), 2 * SPARE

    def threads() -> list[Thread]:
        return [thread for thread in _threads if thread.name == name and thread.is_alive()]

    def run() -> None:
        seen.put(get_ident())
        go.wait()

    for _ in range(many):
        pool.put(run)
    assert len({seen.get() for _ in range(many)}) == many  # none waits for another's end
    go.set()
    wait_until(lambda: SPARE <= len(pool._idle) == len(threads()) < many, state=threads)
    known = {thread.ident for thread in threads()}
    for _ in range(many):
        pool.put(run)
        assert seen.get() in known
        wait_until(lambda: len(pool._idle) == len(threads()))
    pool.end()
    wait_until(lambda: not threads(), state=threads)


def test_an_interrupted_finalizer_runs_again():
    class Held:
        pass

    held, ends = Held(), iter((KeyboardInterrupt, None))

    def end() -> None:
        if error := next(ends):
            raise error

    at_end = weakref.finalize(held, end)
    with pytest.raises(KeyboardInterrupt):
        complete(at_end)
    complete(at_end)
    assert not at_end.alive
    complete(at_end)
    assert next(ends, "none is left") == "none is left"


def test_other_threads_may_change_living_objects_during_an_iteration():
    """As one does that starts threads, or closes a duplicate."""
    one, two, three = Thread(), Thread(), Thread()
    living = Living[Thread]()
    living.add(one)
    living.add(two)
    found = iter(living)
    seen = {next(found)}
    living.add(three)
    living.discard(one)
    assert {*seen, *found} == {one, two}
    assert {*living} == {two, three}
    del two, seen
    assert {*living} == {three}


def test_a_thread_that_cannot_be_started_is_not_joined_at_exit(monkeypatch):
    """The exit would end there with an error, and other threads would not be joined."""

    def start(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start") as kept:  # its traceback has the thread
        spawn(lambda: None, "never started")
    join([thread for thread in _threads if thread.name == "never started"])
    del kept


class Ends:
    def __init__(self) -> None:
        self.ended = Event()

    def end(self) -> None:
        self.ended.set()


@pytest.mark.parametrize("ours", [True, False])
def test_exit_waits_until_a_thread_that_it_ends_has_returned(monkeypatch, ours: bool):
    """One of ours, or a user's that waits in a call."""
    for name in ("_endings", "_threads"):
        monkeypatch.setattr(module, name, Living())
    ends, waits = Ends(), Event()
    at_exit(ends)

    def run() -> None:
        with nullcontext() if ours else WAITING:
            waits.set()
            ends.ended.wait()
        time.sleep(10 * SHORT)

    if ours:
        thread = spawn(run, "late")
    else:
        (thread := Thread(target=run)).start()
    waits.wait()
    module._end()
    assert not thread.is_alive()
