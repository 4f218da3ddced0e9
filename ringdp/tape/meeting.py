"""Lets the ranks of a trace agree on its epoch, on clocks, and on the parts to merge.

On one host all processes share CLOCK_MONOTONIC. A rank of another host asks rank 0 for its time
through the store, at the start and at the end of the trace. Of several answers it takes the
quickest, which is right to half of its round trip, and interpolates between start and end.

The store carries JSON of numbers and text, which is checked when it is read.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import NamedTuple, Protocol

from ringdp.errors import CommunicationError, PeerLost, UsageError
from ringdp.tape.chrome import Shift

log = logging.getLogger("ringdp")

ROUND_TRIPS = 16
PIECE = 1 << 20  # characters of a part per message through the store
LOOK_EVERY = 0.01  # s between looks into the store
WARN_AFTER = 5.0  # s of waiting for another rank to start the trace
SORRY = "!"  # prefix of the reason why there is no part


class Store(Protocol):
    """The methods of torch's stores that are used here."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...
    @property
    def timeout(self) -> timedelta: ...
    def delete_key(self, key: str, /) -> bool: ...


class Guess(NamedTuple):
    """How far rank 0's clock is ahead of this rank's: `offset` ± `error`, in ns."""

    offset: int
    error: int
    at: int  # on this rank's clock


class Member(NamedTuple):
    """Where a rank's process is."""

    host: str
    pid: int


class Opened(NamedTuple):
    """What all ranks of a trace know. `epoch` is in ns on rank 0's clock."""

    epoch: int
    token: str  # unique to this trace
    path: str


class Meeting:
    """One rank's side of the agreement. No other trace may use `store`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        host: str,
        ended: Callable[[int], bool],
        clock: Callable[[], int] = monotonic_ns,
        pid_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """`ended` says whether a process of this host has ended. `pid_of` gives a rank's pid, if it
        is known before the rank comes."""
        self.rank, self.ranks, self.clock, self._ended = rank, ranks, clock, ended
        self._pid_of = pid_of
        self._store = store
        self.members = [Member(host, os.getpid())]
        self.guesses: list[Guess] = []  # empty on rank 0's host

    def open(self, complaint: str | None, path: str) -> Opened:
        """Agree on the trace, with rank 0's `path`. Collective.

        If rank 0 has a `complaint`, raises UsageError on every rank. Raises PeerLost if a rank has
        ended.
        """
        try:
            return self._meet(complaint, path)
        except (PeerLost, UsageError):
            raise
        except (RuntimeError, ValueError, TypeError, OverflowError) as e:
            raise CommunicationError(
                f"rank {self.rank} of {self.ranks} did not meet the others to trace: {e}; "
                "every rank must start the trace"
            ) from e

    def _meet(self, complaint: str | None, path: str) -> Opened:
        self._store.set(f"here/{self.rank}", json.dumps(self.members[0]))
        if self.rank == 0:
            members = [json.loads(self._patiently(f"here/{r}", r)) for r in range(self.ranks)]
            opened = Opened(self.clock(), secrets.token_hex(4), path)
            self._store.set("opened", json.dumps([*opened, complaint, members]))
        else:
            epoch, token, path, complaint, members = json.loads(self._patiently("opened", 0))
            opened = Opened(_time(epoch), bytes.fromhex(token).hex(), str(path))
        self.members = [Member(str(host), int(pid)) for host, pid in members]
        if len(self.members) != self.ranks:
            raise ValueError(f"rank 0 knows of {len(self.members)} ranks")
        if complaint:
            raise UsageError(str(complaint))
        self.compare_clocks("first", None)
        return opened

    def _patiently(self, key: str, rank: int) -> bytes:
        """Wait for a key up to the store's timeout, with a warning if it takes long.

        Raises PeerLost if any rank ends before the trace has started.
        """
        began, warned = monotonic(), False
        while not self._store.check([key]):
            self._check_lost()
            waited = monotonic() - began
            if waited >= WARN_AFTER and not warned:
                warned = True
                log.warning(
                    "rank %d waits for rank %d to start the trace; every rank must", self.rank, rank
                )
            if waited >= self._store.timeout.total_seconds():
                raise RuntimeError(f"rank {rank} has not come in {waited:.0f} s")
            sleep(LOOK_EVERY)
        return self._store.get(key)

    def _check_lost(self) -> None:
        for rank in (*range(1, self.ranks), 0):  # rank 0 may have ended because another had
            key = f"here/{rank}" if rank else "opened"
            if self._ended(self._pid_of(rank)) and not self._store.check([key]):
                here = f"rank {self.rank} of {self.ranks} waited to trace"
                raise PeerLost(f"{here}; rank {rank} has ended")

    @property
    def shift(self) -> Shift:
        """Converts this rank's clock to rank 0's."""
        if not self.guesses:
            return Shift()
        first, last = self.guesses[0], self.guesses[-1]
        return Shift(first.offset, first.at, last.offset, last.at)

    @property
    def away(self) -> list[int]:
        """Ranks on other hosts than rank 0."""
        return [r for r, m in enumerate(self.members) if m.host != self.members[0].host]

    def compare_clocks(self, when: str, limit: float | None) -> None:
        """Ask rank 0 for its time, or answer. Collective over rank 0 and the ranks of other hosts.

        `limit` is in seconds per answer; None means the store's timeout. Raises RuntimeError if an
        answer is late, and ValueError if it makes no sense.
        """
        patience = self._store.timeout if limit is None else timedelta(seconds=limit)
        for r in self.away if self.rank == 0 else [r for r in self.away if r == self.rank]:
            guesses = []
            for k in range(ROUND_TRIPS):
                asked, told = f"{when}/asked/{r}/{k}", f"{when}/told/{r}/{k}"
                if self.rank == 0:
                    self._store.wait([asked], patience)
                    self._store.set(told, str(self.clock()))
                    continue
                before = self.clock()
                self._store.set(asked, "")
                self._store.wait([told], patience)
                after = self.clock()  # the answer was given before the wait's end
                answer = _time(self._store.get(told))
                guesses.append(Guess(answer - (before + after) // 2, (after - before) // 2, before))
            if guesses:
                self.guesses.append(min(guesses, key=lambda guess: guess.error))

    def hand_in(self, part: Path, *, beside: bool) -> None:
        """Tell rank 0 that this rank's part lies `beside` the trace, or else send its contents."""
        pieces = 0
        if not beside:
            with part.open(encoding="utf-8") as text:
                while piece := text.read(PIECE):
                    self._store.set(f"piece/{self.rank}/{pieces}", piece)
                    pieces += 1
            part.unlink()
        self._store.set(f"part/{self.rank}", str(pieces))
        if beside and self._store.check([f"late/{self.rank}"]):
            log.warning("rank 0 did not wait for rank %d's part of the trace: %s", self.rank, part)

    def excuse(self, why: str) -> None:
        """Tell rank 0 why this rank has no part."""
        self._store.set(f"part/{self.rank}", SORRY + why)

    def collect(self, rank: int, part: Path, deadline: float) -> str | None:
        """On rank 0: wait until that rank's part lies at `part`. If it never does, return why.

        Raises RuntimeError if the store fails, and ValueError for nonsense in it.
        """
        while not self._store.check([f"part/{rank}"]):
            if not self._lives(rank) and not self._store.check([f"part/{rank}"]):
                pid = self.members[rank].pid
                return f"rank {rank} (process {pid}) ended before it wrote its part of the trace"
            if monotonic() > deadline:
                self._store.set(f"late/{rank}", "")
                return f"rank {rank} did not write its part of the trace in time"
            sleep(LOOK_EVERY)
        said = self._store.get(f"part/{rank}").decode()
        if said.startswith(SORRY):
            return f"rank {rank} has no part of the trace: {said.removeprefix(SORRY)}"
        if pieces := int(said):
            with part.open("w", encoding="utf-8") as out:
                for k in range(pieces):
                    out.write(self._store.get(f"piece/{rank}/{k}").decode())
                    with suppress(RuntimeError):  # some stores cannot
                        self._store.delete_key(f"piece/{rank}/{k}")
        return None

    def _lives(self, rank: int) -> bool:
        """Whether the rank's process runs, as far as this host can see."""
        return rank in self.away or not self._ended(self.members[rank].pid)


def _time(said: str | bytes | float) -> int:
    """Parse a time in ns. Raises ValueError if it is impossible."""
    if not 0 <= (ns := int(said)) < 1 << 63:
        raise ValueError(f"a clock says {ns}")
    return ns
