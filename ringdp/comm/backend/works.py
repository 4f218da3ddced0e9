"""The works that torch gets for its calls, to wait on, query, or turn into a future.

A future is created on request, and only then does a thread wait for the results: C++ code (torch's
DDP) waits on futures without calling Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import Work as TorchWork
from torch.profiler import record_function

from ringdp.comm.backend import futures
from ringdp.comm.messages import Received
from ringdp.comm.work import Group, Work
from ringdp.errors import UsageError
from ringdp.transport.threads import spawn

UNLIMITED = timedelta(0)  # torch's default for `wait`: the group's timeout
Finish = Callable[[], object]


class Watcher:
    """A thread that waits for works in order and completes their futures."""

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[GroupWork, torch.futures.Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # several threads may ask for the first future

    def watch(self, work: GroupWork, future: torch.futures.Future[Any]) -> None:
        if threading.current_thread() is self._thread:  # called by a future's callback
            future.set_result(work.outcome())
            return
        self._given.put((work, future))
        with self._starting:
            if self._thread is None:
                self._thread = spawn(self._loop, "ringdp-futures")

    def stop(self) -> None:
        """End the thread once all works given to `watch` are done."""
        self._given.put(None)

    def join(self) -> None:
        """After `stop`: wait until the thread has ended, and with it all callbacks."""
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while (given := self._given.get()) is not None:
            work, future = given
            future.set_result(work.outcome())
            del given, work, future  # they keep tensors alive


class GroupWork(TorchWork):
    """Several works of a communicator as one, with functions to run when all have ended."""

    def __init__(
        self,
        works: Iterable[Work],
        results: Sequence[Any],
        finishes: Sequence[Finish] = (),
        limit: float | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """`limit`: seconds of `wait` for all works together, or None for the communicator's timeout
        for each. `watcher`: None for a thread of its own."""
        super().__init__()
        self.all, self._results, self._finishes = Group(works), results, [*finishes]
        self._limit, self._watcher = limit, watcher
        self._ends: list[Finish] = []  # of spans; they run where a work fails, too
        self._finishing = threading.Lock()  # several threads may wait
        self._future: torch._C.Future[Any] | None = None
        self.is_read_in_cpp = False  # see `futures`

    def wait(self, timeout: timedelta | float = UNLIMITED) -> bool:
        """Block until the results are there, for `timeout` (a number: in seconds, as in torch's C++
        works). Raises the communicator's CommunicationErrors."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        try:
            self.all.wait(seconds if seconds > 0 else self._limit)
            self._run_once(self._finishes)
        finally:
            self._run_once(self._ends)
        return True

    def _run_once(self, functions: list[Finish]) -> None:
        """Run these, and drop them once all have returned: an interrupted `wait` runs all again."""
        if functions:
            with self._finishing:
                for function in functions:
                    function()
                functions.clear()

    def end_span(self, span: record_function) -> None:
        """Let the span end with the work, and before `wait` returns or raises: the profiler, which
        the caller may stop then, frees the memory that the end of a span is written to."""
        ended: torch.futures.Future[None] = torch.futures.Future()
        span._call_end_callbacks_on_future(ended)

        def end() -> None:
            if not ended.done():  # an interrupted `wait` calls it again
                ended.set_result(None)

        self._ends.append(end)
        self.get_future()  # whose thread ends it where the caller is late

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        ended = self.all.is_completed()
        if ended:
            if self.exception() is None:
                self._run_once(self._finishes)
            self._run_once(self._ends)
        return ended

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        return self.all.exception()

    def outcome(self) -> list[Any] | Exception:
        """Wait, and return the `result()`, or the error that `wait` raises."""
        try:
            self.wait()
        except Exception as error:
            return error
        return self.result()

    def result(self) -> list[Any]:
        return list(self._results)

    def source_rank(self) -> int:
        """Return the sender of a received message. Raises UsageError if this is of other calls."""
        match self.all.works:
            case [Received() as received]:
                return received.source
        raise UsageError("source_rank: not of a receive; allowed: of the work of one irecv")

    _source_rank = source_rank

    def get_future(self) -> torch._C.Future[Any]:  # type: ignore[override]
        """Return a future of `result()`. Its `value` raises RuntimeError if the work failed."""
        if self.is_read_in_cpp:
            self.wait()
            return futures.of(self.result())
        with self._finishing:
            if self._future is not None:
                return self._future
            ended: torch.futures.Future[Any] = torch.futures.Future()
            self._future = ended.then(_value_of)  # a torch future only fails if a callback raises
        if self.all.is_completed():
            ended.set_result(self.outcome())
        elif self._watcher is not None:
            self._watcher.watch(self, ended)
        else:
            spawn(lambda: ended.set_result(self.outcome()), "ringdp-future")
        return self._future


ENDED = GroupWork((), ())  # the work of a call that has completed


def span_of(what: str) -> record_function | None:
    """Begin a call's span in torch's profiler, if that is active."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return None
    span = record_function(f"ringdp:{what}")
    span.__enter__()  # type: ignore[no-untyped-call]
    return span


def all_of(groups: Sequence[GroupWork], watcher: Watcher) -> GroupWork:
    """Return the works as one."""
    works = [work for group in groups for work in group.all.works]
    results = [result for group in groups for result in group.result()]
    finishes = [partial(group._run_once, group._finishes) for group in groups]
    whole = GroupWork(works, results, finishes, None, watcher)
    whole._ends = [partial(group._run_once, group._ends) for group in groups]
    return whole


def _value_of(ended: torch.futures.Future[Any]) -> Any:
    value = ended.value()
    if isinstance(value, Exception):
        raise value
    return value
