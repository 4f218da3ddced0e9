"""How the ranks that create a transport wait for one another through a store, but not for the dead.

    place/RANK   that rank has arrived, in this process: see `processes`
    failed       the transport cannot be created: see `failures`

If a rank dies before it arrives, the others notice only if another transport's store holds its
place. A rank that has closed that transport may rightly have ended long ago, so ranks that create a
transport from another one synchronize over that one first: see `Communicator.duplicate`.
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

from ringdp.errors import CollectiveTimeout, CommunicationError, UsageError
from ringdp.transport import threads
from ringdp.transport.base import ERRORS, Failure, FailureKind
from ringdp.transport.records import ELSEWHERE
from ringdp.transport.store.client import PATIENCE, StoreClient, StoreSilent
from ringdp.transport.store.failures import LAST_LOOKS, LOOK, Failed, Failures
from ringdp.transport.store.processes import has_ended, introduce, pid_of

FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 0.005  # s between looks for a key
T = TypeVar("T")


class Places(NamedTuple):
    """Where the ranks' processes are recorded: the store of another transport that has them all.

    `ranks` are their numbers there. `failed` returns the failure of the transport on which they
    agreed to create this one: a rank that has left that one will not arrive.
    """

    store: Store
    ranks: Sequence[int]
    failed: Callable[[], Failure | None] = lambda: None


class Handshake:
    """One rank's side. Each step waits up to `timeout` seconds.

    Raises PeerLost if a rank that has arrived dies or gives up, CollectiveTimeout if one is too
    late or the store does not answer, and CommunicationError if the store is gone.
    """

    def __init__(
        self, store: Store, rank: int, ranks: int, timeout: float, places: Places | None = None
    ) -> None:
        """`store` must not be used by any other transport."""
        self.rank, self.ranks, self.timeout = rank, ranks, timeout
        self._places = places or Places(store, range(ranks))
        self._deadline = time.monotonic() + timeout
        self._store = StoreClient(lambda: store)
        self._failures = Failures(self._store, rank, ranks, lambda: True)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Enclose everything that this rank does in the handshake, once. If the block raises, the
        other ranks' blocks raise, too."""
        try:
            with self._translated():
                self._ask(partial(introduce, rank=self.rank))
                yield
        except BaseException as e:
            if isinstance(e, CommunicationError) and self._failures.failure is None:
                with suppress(DistError, OSError):  # a rank's death explains more than its effect
                    self._look(self._ended(range(self.ranks)))
            self._failures.fail(Failed(FailureKind.ABORTED, self.rank, why=str(e)))
            raise
        finally:
            self._store.end()

    def publish(self, key: str, value: str) -> None:
        """Set a key of the store, which other ranks read with `read`."""
        self._ask(lambda store: store.set(key, value))

    def read(self, key: str, rank: int) -> bytes:
        """Return the value of a key, once that rank has set it."""
        self._await({rank: key})
        return self._ask(lambda store: store.get(key))

    def barrier(self, what: str) -> None:
        """Wait until all ranks have reached the point named `what`."""
        self.publish(f"{what}/{self.rank}", "")
        self._await({rank: f"{what}/{rank}" for rank in range(self.ranks)})

    def sees(self, store: Store, ranks: Iterable[int]) -> set[int]:
        """Return those whose processes, recorded in this store, are visible from this one."""
        pids = self._ask(lambda _: {rank: pid_of(store, rank) for rank in ranks})
        return {rank for rank, pid in pids.items() if pid != ELSEWHERE}

    def run(self, act: Callable[[], T]) -> T:
        """Return `act()`, which waits for the other ranks and cannot be cancelled.

        It runs on a thread, which is abandoned if this raises.
        """
        done = threads.Answer[T]()
        threads.spawn(partial(done.find, act), "ringdp-making")
        self._deadline, looks = time.monotonic() + self.timeout, 0
        while True:
            try:
                return done.get(LOOK)
            except Empty:
                ended = self._ended(range(self.ranks))
                looks = looks + 1 if ended else 0
                self._look(ended if looks > LAST_LOOKS else [])  # a finished rank may exit
                if time.monotonic() > self._deadline:
                    raise self._timed_out() from None

    def _await(self, keys: Mapping[int, str]) -> None:
        last_look = time.monotonic()
        self._deadline, pause = last_look + self.timeout, FIRST_PAUSE
        self._look([])  # a rank may have set its key and given up since
        while not self._ask(lambda store: store.check(list(keys.values()))):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if (now := time.monotonic()) < last_look + LOOK:
                continue
            last_look, ended = now, self._ended(self._missing(keys))
            missing = self._missing(keys)
            self._look(set(ended) & set(missing))  # it may have set its key before it ended
            if missing and now > self._deadline:
                late = ", ".join(map(str, missing))
                raise self._timed_out(f"; of its ranks, {late} did not come")

    def _timed_out(self, late: str = "") -> CollectiveTimeout:
        self._failures.fail(Failed(FailureKind.TIMEOUT, self.rank))
        text = f"{self._here()} until the timeout of {self.timeout:g} s{late}"
        return CollectiveTimeout(text)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (CommunicationError, UsageError):
            raise
        except StoreSilent as e:
            self._failures.fail(Failed(FailureKind.TIMEOUT, self.rank))
            raise CollectiveTimeout(f"{self._here()}; {e}") from e
        except DistError as e:
            raise CommunicationError(f"{self._here()}; the store is unreachable: {e}") from e
        except (OSError, RuntimeError) as e:  # no descriptor or no thread left
            raise CommunicationError(f"{self._here()}: {e}") from e

    def _ask(self, act: Callable[[Store], T]) -> T:
        """Like StoreClient.ask. Raises StoreSilent if the store is silent until the timeout."""
        return self._store.ask(act, max(PATIENCE, self._deadline - time.monotonic()))

    def _missing(self, keys: Mapping[int, str]) -> list[int]:
        return self._ask(lambda store: [r for r, key in keys.items() if not store.check([key])])

    def _ended(self, ranks: Iterable[int]) -> list[int]:
        store, there = self._places.store, {rank: self._places.ranks[rank] for rank in ranks}
        pids = self._ask(lambda _: {rank: pid_of(store, n) for rank, n in there.items()})
        return [rank for rank, pid in pids.items() if has_ended(pid)]

    def _look(self, lost: Collection[int]) -> None:
        for rank in lost:
            self._failures.fail(Failed(FailureKind.LOST, rank))
        self._failures.poll()
        if failure := self._failures.failure or self._places.failed():
            raise ERRORS[failure.kind](f"{self._here()}; {failure.cause}")

    def _here(self) -> str:
        return f"rank {self.rank} of {self.ranks} waited to make a communicator"
