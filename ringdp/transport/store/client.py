"""A store accessed from a thread, so that a caller can time out when the store does not answer.

If the process that serves a TCPStore is stopped, calls block until it resumes: they ignore the
store's timeout (torch 2.13: check, get, add, wait, clone and a new TCPStore) and handle no signal.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar, cast

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ringdp.transport import threads

PATIENCE = 1.0  # seconds: an answer takes less than a millisecond
T = TypeVar("T")
Request = tuple[Callable[[Store], Any], threads.Answer[Any]]


class StoreSilent(DistError):
    """The store has not answered in time, and may yet."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the store has given no answer for {seconds:.1f} s: the process that serves it, "
            "perhaps rank 0, is stopped or unreachable"
        )


class StoreClient:
    """A client of a store, with its own thread, which ends with `with` or `end`.

    If the system has no thread left, callers wait for the store themselves, without a limit.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        """`connect` returns the store; the thread calls it, and again if it has raised."""
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._since = [math.inf]  # when the thread began to wait for the store
        self._connect: Callable[[], Store] | None = None  # if there is no thread
        try:
            threads.spawn(partial(_serve, connect, self._requests, self._since), "ringdp-store")
        except RuntimeError:
            self._connect = connect
        self._end = weakref.finalize(self, self._requests.put, None)
        self._end.atexit = False  # a rank publishes its last status at exit, then ends this

    def ask(
        self, act: Callable[[Store], T], patience: float = PATIENCE, *, later: bool = False
    ) -> T:
        """Return `act(store)`, run on the thread, or raise its exception.

        Raises StoreSilent once the store has not answered for `patience` seconds, counting what was
        asked before. The request then runs `later` if that is true, or never.
        """
        if not self._end.alive:
            raise DistError("this client of the store has ended")
        if self._connect:
            return act(self._connect())
        if not later and self._silence() >= patience:
            raise StoreSilent(self._silence())
        answer = threads.Answer[T]()
        self._requests.put((act, answer))
        try:
            return answer.get(max(0.0, patience - self._silence()))
        except Empty:
            answer.wanted = later
            raise StoreSilent(max(patience, self._silence())) from None

    def end(self) -> None:
        """End the thread once it has run all requests."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _silence(self) -> float:
        return max(0.0, time.monotonic() - self._since[0])


class _Limited:
    def __init__(self, store: Store, timeout: float) -> None:
        self.timeout = timedelta(seconds=timeout)
        self._client, self._limit = StoreClient(lambda: store), timeout + PATIENCE
        threads.at_exit(self._client)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *given: self._client.ask(lambda s: getattr(s, method)(*given), self._limit)


def limited(store: Store, timeout: float) -> Store:
    """Return the store with methods that raise StoreSilent after `timeout` seconds, and that Ctrl-C
    interrupts."""
    return cast(Store, _Limited(store, timeout))


def _serve(
    connect: Callable[[], Store], requests: SimpleQueue[Request | None], since: list[float]
) -> None:
    store: Store | None = None

    def connected(act: Callable[[Store], T]) -> T:
        nonlocal store
        store = store or connect()
        return act(store)

    while (request := requests.get()) is not None:
        act, answer = request
        if answer.wanted:
            since[0] = time.monotonic()
            answer.find(partial(connected, act))
            since[0] = math.inf
        del request, act, answer  # and the objects that they hold
