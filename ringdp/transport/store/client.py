"""A store that may give no answer, asked by a thread, so that who asks need not wait for ever.

Where whoever serves a TCPStore is stopped, its calls end when that goes on: the store's timeout
does not count (torch 2.13: for check, get, add, wait, clone and a new TCPStore), and no signal is
seen meanwhile.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ringdp.errors import CommunicationError
from ringdp.transport import threads

PATIENCE = 1.0  # seconds: an answer takes less than a millisecond
T = TypeVar("T")
Asked = tuple[Callable[[Store], Any], threads.Answer[Any]]


class StoreSilent(DistError):
    """The store has given no answer, and may yet."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the store has given no answer for {seconds:.1f} s: whoever serves it, as rank 0 may, "
            "is stopped, or out of reach"
        )


class StoreClient:
    """A store as whoever asks it sees it: `with` ends the thread."""

    def __init__(self, reach: Callable[[], Store]) -> None:
        """`reach` gives the store to the thread, again if it has failed.

        Raises CommunicationError where there is no thread to be had.
        """
        self._asked: SimpleQueue[Asked | None] = SimpleQueue()
        self._since = [math.inf]  # when the thread began to wait for the store
        try:
            threads.spawn(partial(_answer, reach, self._asked, self._since), "ringdp-store")
        except RuntimeError as e:
            raise CommunicationError(f"no store can be asked here: {e}") from e
        self._end = weakref.finalize(self, self._asked.put, None)
        self._end.atexit = False  # who says a last word then ends it

    def ask(
        self, act: Callable[[Store], T], patience: float = PATIENCE, *, later: bool = False
    ) -> T:
        """What it gives, or raises. StoreSilent if the store has given none an answer for that
        long; what is asked then is done `later`, or never."""
        if not self._end.alive:
            raise DistError("the store is asked no more")
        if not later and self._silence() >= patience:
            raise StoreSilent(self._silence())
        answer = threads.Answer[T]()
        self._asked.put((act, answer))
        try:
            return answer.get(max(0.0, patience - self._silence()))
        except Empty:
            answer.wanted = later
            raise StoreSilent(max(patience, self._silence())) from None

    def end(self) -> None:
        """Once all has been done."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _silence(self) -> float:
        return max(0.0, time.monotonic() - self._since[0])


def _answer(
    reach: Callable[[], Store], asked: SimpleQueue[Asked | None], since: list[float]
) -> None:
    store: Store | None = None

    def reached(act: Callable[[Store], T]) -> T:
        nonlocal store
        store = store or reach()
        return act(store)

    while (one := asked.get()) is not None:
        act, answer = one
        if answer.wanted:
            since[0] = time.monotonic()
            answer.find(partial(reached, act))
            since[0] = math.inf
        del one, act, answer  # and what they hold
