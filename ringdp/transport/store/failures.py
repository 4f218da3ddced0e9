"""Failures that ranks without a common memory tell one another, through a store.

    failed       kind rank reporter, and the numbers of two stamps: the first failure stays;
                 below them why, if there is something to say
    closed/RANK  that rank has closed, and will send nothing any more: how many collectives it ended
    closed       one has

Reading it trusts nothing: what makes no sense is a failure too. A store that gives no answer is
none: who waits has a timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ringdp.transport import threads
from ringdp.transport.base import NOTHING, Failure, FailureKind, Stamp
from ringdp.transport.store.client import StoreClient, StoreSilent
from ringdp.transport.store.processes import text_of

LOOK = 0.1  # seconds between looks into the store
LAST_LOOKS = 5  # at a rank that has closed, while what it sent last may be on its way


class Failures:
    """What has failed, as far as this rank knows.

    `busy`: whether something that it has begun has not ended. A store that has gone is a failure
    then only: rank 0, or an agent, may serve it, and end as soon as all is done.
    """

    def __init__(self, store: StoreClient, rank: int, ranks: int, busy: Callable[[], bool]) -> None:
        self.failure: Failure | None = None
        self.changed = threads.Bell()  # also of what else has ended
        self.lock = threading.RLock()
        self.rank = rank
        self._store, self.ranks, self._busy = store, ranks, busy
        self._keys = count()
        self._waiting: dict[int, int] = {}  # by a key of each wait: the rank, or -1 for any
        # By wait, or -1 - the collective, and rank: how many looks since that had closed.
        self._closed: dict[tuple[int, int], int] = {}

    def fail(
        self,
        kind: FailureKind,
        rank: int,
        stamps: tuple[Stamp, Stamp] | None = None,
        why: str = "",
    ) -> None:
        """Tell the others, unless this rank has heard of a failure, or been first to tell."""
        expected, found = stamps or (NOTHING, NOTHING)
        said = " ".join(map(str, (kind.value, rank, self.rank, *expected, *found))) + f"\n{why}"
        with self.lock:
            if self.failure is not None:
                return
            self.failure = Failure(kind, rank, self.rank, expected, found, why)
            with suppress(DistError):  # whoever served the store has gone: nobody can be told
                first = self._store.ask(lambda s: s.compare_set("failed", "", said), later=True)
                self.failure = _parsed(first, self.rank, self.ranks)
        self.changed.ring()

    def leave(self, finished: int) -> None:
        """This rank closes, having ended so many collectives: what it still waits for is over, and
        who waits for it shall know."""
        with self.lock, suppress(DistError):
            if self.failure is None:
                self.failure = Failure(FailureKind.STOPPED, self.rank, self.rank)
                self._store.ask(partial(self._close, str(finished)), later=True)
        self.changed.ring()

    def _close(self, finished: str, store: Store) -> None:
        store.set(f"closed/{self.rank}", finished)
        store.set("closed", "")

    def left(self, rank: int) -> bool:
        """Whether that rank has closed."""
        return self._store.ask(partial(self._closed_in, rank))

    def _closed_in(self, rank: int, store: Store) -> bool:
        """For -1, whether all others have."""
        others = [r for r in range(self.ranks) if r != self.rank] if rank < 0 else [rank]
        return all(store.check([f"closed/{r}"]) for r in others)

    @contextmanager
    def waits_for(self, rank: int) -> Iterator[None]:
        """What the block waits for comes from that rank, or -1: from any."""
        key = next(self._keys)
        self._waiting[key] = rank
        try:
            yield
        finally:
            del self._waiting[key]

    def look(self, collective: int | None = None) -> None:
        """What others have told, and whether those that this rank waits for have left, as all are
        in the collective that it is in."""
        if self.failure is not None:
            return
        waiting = dict(list(self._waiting.items()))
        try:
            said, closed = self._store.ask(partial(self._found, waiting, collective))
        except StoreSilent:
            return
        except DistError:
            if self._busy():
                self.fail(FailureKind.LOST, 0)
            return
        if said is not None:
            with self.lock:
                self.failure = self.failure or _parsed(said, self.rank, self.ranks)
            self.changed.ring()
            return
        self._closed = {key: self._closed.get(key, 0) + 1 for key in closed}
        if lost := [key for key, looks in self._closed.items() if looks > LAST_LOOKS]:
            _, rank = min(lost)
            self.fail(FailureKind.LOST, somebody(rank, self.rank))

    def _found(
        self, waiting: dict[int, int], collective: int | None, store: Store
    ) -> tuple[bytes | None, list[tuple[int, int]]]:
        """What is said to have failed, and which waits are for ranks that have closed."""
        if store.check(["failed"]):
            return store.get("failed"), []
        closed = [(key, rank) for key, rank in waiting.items() if self._closed_in(rank, store)]
        if collective is not None and store.check(["closed"]):
            closed += [(-1 - collective, r) for r in self._without(collective, store)]
        return None, closed

    def _without(self, collective: int, store: Store) -> Iterator[int]:
        """Ranks that have closed before they had ended it."""
        for rank in range(self.ranks):
            finished = text_of(store, f"closed/{rank}")
            if finished.isdecimal() and len(finished) < 20 and int(finished) <= collective:
                yield rank


def failure_in(store: Store, ranks: int) -> Failure | None:
    """What has failed in a transport whose store that is, as anybody may read it."""
    if not store.check(["failed"]):
        return None
    return _parsed(store.get("failed"), 0, ranks)


def somebody(rank: int, here: int) -> int:
    """The rank, or for -1 one that is not `here`."""
    return rank if rank >= 0 else int(here == 0)


def _parsed(said: bytes, rank: int, ranks: int) -> Failure:
    with suppress(ValueError):
        numbers, _, why = said.decode(errors="replace").partition("\n")
        kind, who, reporter, a, b, c, d, e, f = map(int, numbers.split())
        if {who, reporter} <= set(range(ranks)):
            why = "".join(x if x.isprintable() else "?" for x in why)
            return Failure(FailureKind(kind), who, reporter, (a, b, c), (d, e, f), why)
    return Failure(FailureKind.DAMAGED, rank, rank)
