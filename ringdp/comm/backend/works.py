"""What torch gets for a call: to wait for, to ask for, or as a future.

A future is made when it is asked for, and only then does a thread wait for the results; C++ code
(torch DDP's) waits for futures without asking Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from ringdp.comm.backend import futures
from ringdp.comm.messages import Received
from ringdp.comm.work import Group, Work
from ringdp.transport.threads import spawn

UNLIMITED = timedelta(0)  # torch's way to say: as long as the group's timeout
Finish = Callable[[], None]


class Watcher:
    """A thread that waits for works in their order, and completes their futures."""

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[GroupWork, torch.futures.Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, work: GroupWork, future: torch.futures.Future[Any]) -> None:
        if threading.current_thread() is self._thread:  # a callback asks: nobody else is there
            future.set_result(work.outcome() or work.result())
            return
        self._given.put((work, future))
        if self._thread is None:
            self._thread = spawn(self._loop, "ringdp-futures")

    def stop(self) -> None:
        """Once what has been given is over."""
        self._given.put(None)

    def join(self) -> None:
        """After `stop`: until callbacks of what has been given are over, too."""
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while (given := self._given.get()) is not None:
            work, future = given
            future.set_result(work.outcome() or work.result())
            del given, work, future  # they hold tensors


class GroupWork(TorchWork):
    """Some works of a communicator as one, with what is to be done when all have ended."""

    def __init__(
        self,
        works: Iterable[Work],
        results: Sequence[Any],
        finishes: Sequence[Finish],
        limit: float | None,
        watcher: Watcher | None,
    ) -> None:
        """`limit`: seconds that `wait` lasts, for all of them together; None: the communicator's,
        for each. No `watcher`: one for itself."""
        super().__init__()
        self.all, self._results, self._finishes = Group(works), results, finishes
        self._limit, self._watcher = limit, watcher
        self._finishing = threading.Lock()  # two threads may wait
        self._future: torch._C.Future[Any] | None = None
        self.is_read_in_cpp = False  # see `futures`

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Block until the results are there. Raises CommunicationError as the communicator does."""
        seconds = timeout.total_seconds()
        self.all.wait(seconds if seconds > 0 else self._limit)
        self._complete()
        return True

    def _complete(self) -> None:
        if self._finishes:
            with self._finishing:
                for finish in self._finishes:
                    finish()
                self._finishes = ()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        ended = self.all.is_completed()
        if ended and self.exception() is None:
            self._complete()
        return ended

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        return self.all.exception()

    def outcome(self) -> Exception | None:
        """Wait, and give the error that `wait` raises, or None."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Any]:
        return list(self._results)

    def source_rank(self) -> int:
        """Of a received message: who sent it."""
        (work,) = self.all.works
        assert isinstance(work, Received)
        return work.source

    _source_rank = source_rank

    def get_future(self) -> torch._C.Future[Any]:  # type: ignore[override]
        """Of `result()`. Who asks it for the value of a work that failed gets a RuntimeError."""
        if self.is_read_in_cpp:
            self.wait()
            return futures.of(self.result())
        with self._finishing:
            if self._future is not None:
                return self._future
            told: torch.futures.Future[Any] = torch.futures.Future()
            self._future = told.then(_value)  # torch fails a future only where a callback raises
        if self.all.is_completed():
            told.set_result(self.outcome() or self.result())
        elif self._watcher is not None:
            self._watcher.watch(self, told)
        else:
            alone = Watcher()
            alone.watch(self, told)
            alone.stop()
        return self._future


ENDED = GroupWork((), (), (), None, None)  # of a call that has waited itself


class Span:
    """What torch's profiler is told of a call: from now until its future is there."""

    def __init__(self, what: str) -> None:
        self._record = torch.profiler.record_function(f"ringdp:{what}")
        self._record.__enter__()  # type: ignore[no-untyped-call]

    def end_with(self, work: GroupWork) -> None:
        self._record._call_end_callbacks_on_future(work.get_future())  # type: ignore[arg-type]


def span_of(what: str) -> Span | None:
    """None where nothing is profiled."""
    return Span(what) if torch.autograd.profiler._is_profiler_enabled else None


def all_of(groups: Sequence[GroupWork], watcher: Watcher) -> GroupWork:
    """Them as one."""
    works = [work for group in groups for work in group.all.works]
    results = [result for group in groups for result in group.result()]
    return GroupWork(works, results, [group._complete for group in groups], None, watcher)


def _value(told: torch.futures.Future[Any]) -> Any:
    value = told.value()
    if isinstance(value, Exception):
        raise value
    return value
