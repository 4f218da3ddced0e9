"""Threads that wait outside Python, which must be back before the interpreter is gone.

One that comes back later finds nothing to come back to, and std::terminate ends the process with
SIGABRT, after all has gone well. So at exit everything that such threads wait for ends first. A
user's thread, if it is a daemon, is one of them while it waits.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol
from weakref import WeakSet

import torch

PATIENCE = 1.0  # seconds for all threads; who is late waits for what cannot come any more


class Ending(Protocol):
    def end(self) -> None:
        """Make whoever waits in this object come back, with an error. Called at exit."""


_endings: WeakSet[Ending] = WeakSet()
_threads: WeakSet[threading.Thread] = WeakSet()
_waits: list[None] = []  # as many as are under way


class _Waiting:
    """For what a user's thread waits for."""

    def __enter__(self) -> None:
        _waits.append(None)

    def __exit__(self, *_: object) -> None:
        _waits.pop()


WAITING = _Waiting()


class Queue:
    """A thread that does one job after the other, in the order in which they are put."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        at_exit(self)
        spawn(self._loop, name)

    def put(self, job: Callable[[], object]) -> None:
        """What it raises is shown, and ends no other."""
        self._jobs.put(job)

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
    for ending in list(_endings):
        ending.end()
    until = time.monotonic() + PATIENCE
    while _waits and time.monotonic() < until:
        time.sleep(0.001)
    join(list(_threads))


def join(threads: list[threading.Thread]) -> None:
    """Wait for them, together at most PATIENCE."""
    until = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
