"""Threads that wait outside Python, which must be back before the interpreter is gone.

One that comes back later finds nothing to come back to, and std::terminate ends the process with
SIGABRT, after all has gone well. So at exit everything that such threads wait for ends first. A
user's thread, if it is a daemon, is one of them while it waits, and until it has ended with the
error that this brings it.

Note [Ctrl-C comes after any call]
    Python runs a signal's handler, on the main thread, as a function begins, as a loop goes on, and
    as a call of C returns, but not between two assignments. So whatever counts as begun is what one
    call of C puts into a thread's queue, with nothing but assignments before it. And who waits
    holds no lock that Python code takes, as a Condition or a Future does: what is interrupted after
    it was taken, and before anybody is to give it back, leaves all others waiting. A lock of C's in
    a `with` is safe.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch

PATIENCE = 1.0  # seconds for all threads; who is late waits for what cannot come any more
T = TypeVar("T")


class Ending(Protocol):
    def end(self) -> None:
        """Make whoever waits in this object come back, with an error. Called at exit."""


_endings: WeakSet[Ending] = WeakSet()
_threads: WeakSet[threading.Thread] = WeakSet()
_waits = set[int]()  # threads


class _Waiting:
    """For what a user's thread waits for."""

    def __enter__(self) -> None:
        _waits.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        _waits.discard(threading.get_ident())


WAITING = _Waiting()


class Queue:
    """A thread that does one job after the other, in the order in which they are put."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        # C's. What a job raises is shown, and ends no other.
        self.put: Callable[[Callable[[], object]], None] = self._jobs.put
        at_exit(self)
        spawn(self._loop, name)

    def end(self) -> None:
        """Once all that were put have been done. Also see `Ending`."""
        self._jobs.put(None)

    @torch.inference_mode()  # in which a job may write to whatever tensor there is
    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:
                threading.excepthook(  # under no name, which would keep all that the job held
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )
            del job  # and the buffers that it holds


class Bell:
    """Rung where something has changed: see Note [Ctrl-C comes after any call]."""

    def __init__(self) -> None:
        self._waiting: deque[threading.Lock] = deque()

    def ring(self) -> None:
        with suppress(IndexError):
            while True:
                self._waiting.popleft().release()

    def wait_for(self, holds: Callable[[], object], timeout: float | None = None) -> None:
        """Until it holds, which is asked again at each ring; at most so many seconds."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not holds() and (left := until - time.monotonic()) > 0:
            rung = threading.Lock()
            rung.acquire()
            self._waiting.append(rung)
            if not holds():  # it may do since, and have been rung
                rung.acquire(timeout=min(left, threading.TIMEOUT_MAX))
            with suppress(ValueError):
                self._waiting.remove(rung)


class Answer(Generic[T]):
    """What a thread finds out, or the error that it ends in, for who waits: see the same Note."""

    wanted = True

    def __init__(self) -> None:
        self._found: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()

    def find(self, act: Callable[[], T]) -> None:
        """On the thread."""
        try:
            self._found.put((act(),))
        except BaseException as e:
            self._found.put(e)

    def get(self, seconds: float) -> T:
        """Once. Raises queue.Empty where it does not come within that time."""
        found = self._found.get(timeout=seconds)
        if isinstance(found, BaseException):
            raise found
        return found[0]


def complete(end: weakref.finalize[..., Any]) -> None:
    """Call it. Where Ctrl-C ends it half-way, it is called again: here, or as it would be."""
    if there := end.peek():
        _, act, args, _ = there
        act(*args)
        end.detach()


def at_exit(ending: Ending) -> None:
    _endings.add(ending)


def spawn(run: Callable[[], None], name: str) -> threading.Thread:
    """A thread that does not keep the process from its end, and is gone before the interpreter."""
    thread = threading.Thread(target=run, daemon=True, name=name)
    _threads.add(thread)
    thread.start()
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
    """Wait for them, together at most PATIENCE."""
    until = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
