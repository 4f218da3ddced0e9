"""How the ranks that make a transport wait for one another, through a store: not for the dead.

    place/RANK   that rank has come: see `processes`
    failed       it cannot be made: see `failures`

A rank that dies before it comes is known where it has been in another transport, whose store tells
its place; but who has left that may have ended long ago, so ranks that make one of another's meet
there first: see `Communicator.duplicate`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty
from typing import NamedTuple, TypeVar

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ringdp.errors import CollectiveTimeout, CommunicationError, PeerLost, UsageError
from ringdp.transport import threads
from ringdp.transport.base import Failure, FailureKind
from ringdp.transport.store.client import PATIENCE, StoreClient, StoreSilent
from ringdp.transport.store.failures import LAST_LOOKS, LOOK, Failures
from ringdp.transport.store.processes import has_ended, introduce, pid_of

FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 0.005  # s between looks for a key
T = TypeVar("T")


class Places(NamedTuple):
    """Of another transport, which has all these ranks: its store, and the number there of each. The
    one on which they agreed to make this must not have `failed`: who has left it does not come."""

    store: Store
    ranks: Sequence[int]
    failed: Callable[[], Failure | None] = lambda: None


class Handshake:
    """One rank's side. It waits for as long as the store's timeout says.

    Raises PeerLost where a rank that has come dies or gives up, CollectiveTimeout where one is too
    late or the store gives no answer, CommunicationError where that has gone.
    """

    def __init__(self, store: Store, rank: int, ranks: int, places: Places | None = None) -> None:
        """`store` is for this transport alone."""
        self.rank, self.ranks = rank, ranks
        self._places = places or Places(store, range(ranks))
        self._allowed: float = store.timeout.total_seconds()  # type: ignore[attr-defined]  # stubs
        self._until = time.monotonic() + self._allowed
        self._store = StoreClient(lambda: store)
        self._failures = Failures(self._store, rank, ranks, lambda: True)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """All that this rank does for it, once. If it raises, so do the others."""
        try:
            with self._translated():
                self._ask(partial(introduce, rank=self.rank))
                yield
        except BaseException as e:
            if isinstance(e, CommunicationError) and self._failures.failure is None:
                with suppress(DistError, OSError):  # which says more than what came of it
                    self._look(self._ended(range(self.ranks)))
            self._failures.fail(FailureKind.ABORTED, self.rank, why=str(e))
            raise
        finally:
            self._store.end()

    def say(self, key: str, what: str) -> None:
        self._ask(lambda store: store.set(key, what))

    def heard(self, key: str, rank: int) -> bytes:
        """What that rank says there."""
        self._await({rank: key})
        return self._ask(lambda store: store.get(key))

    def together(self, what: str) -> None:
        """Return once all have come to it."""
        self.say(f"{what}/{self.rank}", "")
        self._await({rank: f"{what}/{rank}" for rank in range(self.ranks)})

    def called(self, act: Callable[[], T]) -> T:
        """What it gives, which waits for the others, and cannot stop: else it is left alone."""
        done = threads.Answer[T]()
        threads.spawn(partial(done.find, act), "ringdp-making")
        self._until, looks = time.monotonic() + self._allowed, 0
        while True:
            try:
                return done.get(LOOK)
            except Empty:
                ended = self._ended(range(self.ranks))
                looks = looks + 1 if ended else 0
                self._look(ended if looks > LAST_LOOKS else [])  # who has done its part may end

    def _await(self, keys: Mapping[int, str]) -> None:
        looked = time.monotonic()
        self._until, pause = looked + self._allowed, FIRST_PAUSE
        self._look([])  # what is there may be of a rank that has given up since
        while not self._ask(lambda store: store.check(list(keys.values()))):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if (now := time.monotonic()) < looked + LOOK:
                continue
            looked, ended = now, self._ended(self._missing(keys))
            missing = self._missing(keys)
            self._look(set(ended) & set(missing))  # it may have come before its end
            if missing and now > self._until:
                self._failures.fail(FailureKind.TIMEOUT, self.rank)
                late = ", ".join(map(str, missing))
                raise CollectiveTimeout(
                    f"{self._here()} until the timeout of {self._allowed:g} s; of its ranks, "
                    f"{late} did not come"
                )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (CommunicationError, UsageError):
            raise
        except StoreSilent as e:
            self._failures.fail(FailureKind.TIMEOUT, self.rank)
            raise CollectiveTimeout(f"{self._here()}; {e}") from e
        except DistError as e:
            raise CommunicationError(f"{self._here()}; the store is out of reach: {e}") from e
        except (OSError, RuntimeError) as e:  # no descriptor, no thread
            raise CommunicationError(f"{self._here()}: {e}") from e

    def _ask(self, act: Callable[[Store], T]) -> T:
        """StoreSilent, once the time is up."""
        return self._store.ask(act, max(PATIENCE, self._until - time.monotonic()))

    def _missing(self, keys: Mapping[int, str]) -> list[int]:
        return self._ask(lambda store: [r for r, key in keys.items() if not store.check([key])])

    def _ended(self, ranks: Iterable[int]) -> list[int]:
        store, there = self._places.store, {rank: self._places.ranks[rank] for rank in ranks}
        pids = self._ask(lambda _: {rank: pid_of(store, n) for rank, n in there.items()})
        return [rank for rank, pid in pids.items() if has_ended(pid)]

    def _look(self, lost: Collection[int]) -> None:
        for rank in lost:
            self._failures.fail(FailureKind.LOST, rank)
        self._failures.look()
        if failure := self._failures.failure or self._places.failed():
            raise self._error(failure)

    def _error(self, failure: Failure) -> CommunicationError:
        match failure.kind:
            case FailureKind.LOST:
                return PeerLost(f"{self._here()}; rank {failure.rank} has ended")
            case FailureKind.TIMEOUT:
                return CollectiveTimeout(f"{self._here()}; rank {failure.rank} gave up waiting")
            case FailureKind.DAMAGED:
                return CommunicationError(f"{self._here()}; what its store says makes no sense")
            case _:
                why = f" ({failure.why})" * bool(failure.why)
                return PeerLost(f"{self._here()}; rank {failure.rank} has given up{why}")

    def _here(self) -> str:
        return f"rank {self.rank} of {self.ranks} waited to make a communicator"
