"""How ranks without shared memory report failures to one another, through a store.

    failed       the first failure: kind, rank, reporter and the numbers of two stamps on one line;
                 the reason below, or nothing
    closed/RANK  set when that rank has closed, after which it sends nothing: the number of
                 collectives that it had finished
    closed       set when any rank has closed

Readers trust nothing: a malformed failure is a failure, too. A store that does not answer is none,
as waiting callers have a timeout.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ringdp.transport import threads
from ringdp.transport.base import NOTHING, Failure, FailureKind, Stamp
from ringdp.transport.store.client import StoreClient, StoreSilent
from ringdp.transport.store.processes import text_of

LOOK = 0.1  # seconds between looks into the store
LAST_LOOKS = 5  # before a rank that has closed is lost: its last messages may be in flight


@dataclass(eq=False)
class Failed(Exception):
    """A `Failure` that this rank has found. `rank` is -1 for some rank other than this one."""

    kind: FailureKind
    rank: int
    expected: Stamp = NOTHING
    found: Stamp = NOTHING
    why: str = ""


class Failures:
    """The communicator's first failure, as far as this rank knows, and what it waits for.

    `busy()` says whether anything that this rank has started has not ended. Only then is a
    vanished store a failure: the process that serves it, rank 0 or an agent, may end when all is
    done.
    """

    def __init__(self, store: StoreClient, rank: int, ranks: int, busy: Callable[[], bool]) -> None:
        self.failure: Failure | None = None
        self.changed = threads.Bell()  # rung on a failure, and when anything has ended
        self._failed = threads.Bell()  # on a failure only: each message wakes those at `changed`
        self.lock = threading.RLock()
        self.rank = rank
        self._store, self.ranks, self._busy = store, ranks, busy
        self._keys = count()
        self._waiting: dict[int, int] = {}  # wait's key -> rank waited for, or -1 for any
        # (wait's key, or -1 - collective; rank) -> looks since that rank has closed.
        self._closed: dict[tuple[int, int], int] = {}

    def fail(self, one: Failed) -> None:
        """Report it to all ranks, unless this rank knows of a failure already."""
        rank = one.rank if one.rank >= 0 else int(self.rank == 0)
        failure = Failure(one.kind, rank, self.rank, one.expected, one.found, one.why)
        numbers = one.kind.value, rank, self.rank, *one.expected, *one.found
        text = " ".join(map(str, numbers)) + f"\n{one.why}"
        with self.lock:
            if self.failure is not None:
                return
            with suppress(DistError):  # without a store, the others cannot be told
                first = self._store.ask(lambda s: s.compare_set("failed", "", text), later=True)
                failure = _parsed(first, self.rank, self.ranks)
            self.failure = failure  # not before: a waiting thread raises what it sees here
        self._ring()

    def wait_until(self, holds: Callable[[], object], timeout: float = math.inf) -> None:
        """Return when `holds()` is true or there is a failure, or after `timeout` seconds."""
        self.changed.wait_for(lambda: self.failure or holds(), timeout)

    def wait(self, timeout: float) -> None:
        """Return when there is a failure, or after `timeout` seconds."""
        self._failed.wait_for(lambda: self.failure, timeout)

    def _ring(self) -> None:
        self.changed.ring()
        self._failed.ring()

    def close(self, finished: int) -> None:
        """Record that this rank closes, having finished so many collectives. Its own waits end,
        and ranks that wait for it will notice."""
        with self.lock, suppress(DistError):
            if self.failure is None:
                self.failure = Failure(FailureKind.STOPPED, self.rank, self.rank)
                self._store.ask(partial(self._close, str(finished)), later=True)
        self._ring()

    def _close(self, finished: str, store: Store) -> None:
        store.set(f"closed/{self.rank}", finished)
        store.set("closed", "")

    def has_closed(self, rank: int) -> bool:
        """Return whether that rank has closed."""
        return self._store.ask(partial(self._closed_in, rank))

    def _closed_in(self, rank: int, store: Store) -> bool:
        """Return whether that rank has closed, or for -1, whether all others have."""
        others = [r for r in range(self.ranks) if r != self.rank] if rank < 0 else [rank]
        return all(store.check([f"closed/{r}"]) for r in others)

    @contextmanager
    def waits_for(self, rank: int) -> Iterator[None]:
        """Declare that the block waits for that rank, or for any if it is -1."""
        key = next(self._keys)
        self._waiting[key] = rank
        try:
            yield
        finally:
            del self._waiting[key]

    def poll(self, collective: int | None = None) -> None:
        """Read the store for failures, and for ranks that have closed though this one needs them:
        those that it waits for, and all that had not finished the collective that it runs."""
        if self.failure is not None:
            return
        waiting = self._waiting.copy()
        try:
            failed, closed = self._store.ask(partial(self._found, waiting, collective))
        except StoreSilent:
            return
        except DistError:
            if self._busy():
                self.fail(Failed(FailureKind.LOST, 0))
            return
        if failed is not None:
            with self.lock:
                self.failure = self.failure or failed
            self._ring()
            return
        self._closed = {key: self._closed.get(key, 0) + 1 for key in closed}
        if lost := [key for key, looks in self._closed.items() if looks > LAST_LOOKS]:
            _, rank = min(lost)
            self.fail(Failed(FailureKind.LOST, rank))

    def _found(
        self, waiting: dict[int, int], collective: int | None, store: Store
    ) -> tuple[Failure | None, list[tuple[int, int]]]:
        """Return the reported failure, and the keys of `_closed` for ranks that have closed."""
        if failed := failure_in(store, self.ranks, self.rank):
            return failed, []
        closed = [(key, rank) for key, rank in waiting.items() if self._closed_in(rank, store)]
        if collective is not None and store.check(["closed"]):
            closed += [(-1 - collective, r) for r in self._without(collective, store)]
        return None, closed

    def _without(self, collective: int, store: Store) -> Iterator[int]:
        """Yield the ranks that closed before they had finished that collective."""
        for rank in range(self.ranks):
            finished = text_of(store, f"closed/{rank}")
            if finished.isdecimal() and len(finished) < 20 and int(finished) <= collective:
                yield rank


def failure_in(store: Store, ranks: int, here: int = 0) -> Failure | None:
    """Return the failure, if any, of the transport that uses this store, as seen by rank `here`."""
    return _parsed(store.get("failed"), here, ranks) if store.check(["failed"]) else None


def _parsed(text: bytes, rank: int, ranks: int) -> Failure:
    with suppress(ValueError):
        numbers, _, why = text.decode(errors="replace").partition("\n")
        kind, who, reporter, a, b, c, d, e, f = map(int, numbers.split())
        if {who, reporter} <= set(range(ranks)):
            why = "".join(x if x.isprintable() else "?" for x in why)
            return Failure(FailureKind(kind), who, reporter, (a, b, c), (d, e, f), why)
    return Failure(FailureKind.DAMAGED, rank, rank)
