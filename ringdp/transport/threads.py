"""Background threads that block outside Python and must return before the interpreter is gone.

If one returns later, std::terminate ends the process with SIGABRT although everything went well.
So at exit, everything that such threads wait for is ended first. This includes a user's daemon
thread while it waits in a call, and until the error that ends this wait has ended the thread.

Note [Ctrl-C comes after any call]
    Python runs signal handlers on the main thread: when a function starts, when a loop repeats, and
    when a C call returns, but not between two assignments. So a job counts as started when one C
    call puts it into a thread's queue, and only assignments come just before that call. A waiting
    thread holds no lock that Python code acquires, as Condition and Future do: an interrupt between
    acquiring it and entering the block that releases it would leave all others waiting for ever. A
    C lock in a `with` is safe, and so is `Grouping`; several C calls are one in `in_a_row`.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import call
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from ringdp._core import Grouping as Grouping  # the block of Communicator.group

PATIENCE = 1.0  # seconds at exit for all threads together; a late one waits for a lost event
SPARE = 8  # idle threads that a pool keeps
T = TypeVar("T")


class Living(Generic[T]):
    """Objects that it does not keep alive. Unlike with a WeakSet, other threads may add and discard
    objects during an iteration."""

    def __init__(self) -> None:
        self._objects = WeakKeyDictionary[T, None]()

    def add(self, one: T) -> None:
        self._objects[one] = None

    def discard(self, one: T) -> None:
        self._objects.pop(one, None)

    def __iter__(self) -> Iterator[T]:
        found = [ref() for ref in self._objects.keyrefs()]
        return (one for one in found if one is not None)


class Ending(Protocol):
    def end(self) -> None:
        """Make every thread that waits in this object return with an error. Called at exit."""


_endings = Living[Ending]()
_threads = Living[threading.Thread]()
_waits = set[int]()  # ids of the user's threads that wait in a call


class _Waiting:
    """Context manager around a user's thread's waits."""

    def __enter__(self) -> None:
        _waits.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        _waits.discard(threading.get_ident())


WAITING = _Waiting()


class Queue:
    """A thread that runs jobs one after the other, in the order in which they are put. An exception
    in a job is printed and does not affect other jobs."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.put: Callable[[Callable[[], object]], None] = self._jobs.put  # a C call
        self._name = name
        at_exit(self)
        spawn(self._loop, name)

    def end(self) -> None:
        """End the thread after all jobs that have been put. See also `Ending`."""
        self._jobs.put(None)

    def _before_job(self) -> None:
        """The calling thread has taken a job."""

    def _after_job(self) -> bool:
        """Return whether the calling thread is to take another job."""
        return True

    @torch.inference_mode()  # so that a job may write to any tensor, inference tensors included
    def _loop(self) -> None:
        torch.set_flush_denormal(False)  # a new thread inherits it, and sums would depend on it
        while (job := self._jobs.get()) is not None:
            self._before_job()
            try:
                job()
            except BaseException:
                threading.excepthook(
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )
            del job  # and the buffers that it holds
            if not self._after_job():
                return
        self._jobs.put(None)  # for the next thread


class Pool(Queue):
    """Threads for jobs that block: each job has one for itself.

    A thread that takes a job starts another if none waits for the next. (The caller must not, as
    Ctrl-C while Python starts a thread may be an error of its lock.) Up to SPARE idle threads stay
    for later jobs: starting one takes 44 us, waking one 10.
    """

    def __init__(self, name: str) -> None:
        self._idle = deque[None]([None])  # one for every thread that waits, or is about to
        super().__init__(name)

    def _before_job(self) -> None:
        self._idle.pop()
        if not self._idle:
            self._idle.append(None)
            try:
                spawn(self._loop, self._name)
            except RuntimeError:  # the system has none left: jobs wait for this thread
                self._idle.pop()

    def _after_job(self) -> bool:
        stays = len(self._idle) < SPARE
        if stays:
            self._idle.append(None)
        return stays


def in_a_row(*calls: Callable[[], object]) -> None:
    """Make these C calls with no Ctrl-C in between."""
    deque(map(call, calls), maxlen=0)


class Bell:
    """A condition variable without a Python lock: see Note [Ctrl-C comes after any call]."""

    def __init__(self) -> None:
        self._waiting: deque[threading.Lock] = deque()

    def ring(self) -> None:
        with suppress(IndexError):
            while True:
                self._waiting.popleft().release()

    def wait_for(self, holds: Callable[[], object], timeout: float = math.inf) -> None:
        """Return when `holds()` is true, or after `timeout` seconds. Each ring rechecks it."""
        until = time.monotonic() + timeout
        while not holds() and (left := until - time.monotonic()) > 0:
            rung = threading.Lock()
            rung.acquire()
            self._waiting.append(rung)
            if not holds():  # it may have become true, and the bell rung, before the append
                rung.acquire(timeout=min(left, threading.TIMEOUT_MAX))
            with suppress(ValueError):
                self._waiting.remove(rung)


class Answer(Generic[T]):
    """A future without a Python lock: see Note [Ctrl-C comes after any call]."""

    wanted = True

    def __init__(self) -> None:
        self._found: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()

    def find(self, act: Callable[[], T]) -> None:
        """Set the result, or the exception, of `act()`. Called on the thread that finds it."""
        try:
            self._found.put((act(),))
        except BaseException as e:
            self._found.put(e)

    def get(self, seconds: float) -> T:
        """Return the result, once. Raises its exception, or queue.Empty after `seconds`."""
        found = self._found.get(timeout=seconds)
        if isinstance(found, BaseException):
            raise found
        return found[0]


def complete(end: weakref.finalize[..., Any]) -> None:
    """Call a finalizer such that, if Ctrl-C interrupts it, it stays armed and can run again."""
    if there := end.peek():
        _, act, args, _ = there
        act(*args)
        end.detach()


def at_exit(ending: Ending) -> None:
    _endings.add(ending)


def spawn(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread, which does not keep the process alive and is joined at exit."""
    thread = threading.Thread(target=run, daemon=True, name=name)
    thread.start()
    _threads.add(thread)  # one that could not be started cannot be joined
    return thread


@atexit.register
def _end() -> None:
    waited = _waits - {threading.get_ident()}
    for ending in list(_endings):
        ending.end()
    until = time.monotonic() + PATIENCE
    while waited & {thread.ident for thread in threading.enumerate()} and time.monotonic() < until:
        time.sleep(0.001)
    join(list(_threads))


def join(threads: list[threading.Thread]) -> None:
    """Wait for the threads, at most PATIENCE in total."""
    until = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
