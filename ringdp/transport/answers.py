"""What the ranks do that share no memory: each one answers, through the store, when another asks.

    place/RANK   its process: see `processes`
    asked        how often a rank has asked
    state/RANK   how often it had been asked when it said the rest: a line of its RankRecord's
                 numbers, its message or nothing, and its last calls, a line each

A thread of every rank looks whether somebody asks, so those in the user's code answer too. A rank's
last word, that of a failure or of its end, answers all who ask later. Who is stopped or dead does
not answer; its process, where it can be seen, says which. Reading trusts nothing: what makes no
sense is no answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ringdp.transport.base import FailureKind
from ringdp.transport.processes import introduce, pid_of, text_of
from ringdp.transport.records import (
    CALLS,
    CLOSED,
    SILENT,
    Call,
    Observed,
    RankRecord,
    heard,
    said,
)
from ringdp.transport.told import LOOK, Told, own_connection

PATIENCE = 0.4  # seconds that an answer may take: ranks look every 0.1 s
PAUSE = 0.01  # seconds between looks for answers
LAST = 1 << 62  # for `asked`: a last word
LONGEST = 32 << 10  # bytes of an answer


class State(NamedTuple):
    """What a rank says that it does."""

    record: RankRecord
    message: Call | None = None
    calls: Mapping[int, Call] = {}


class Survey(NamedTuple):
    """All ranks, at one moment. See `records.Observed`."""

    states: tuple[State | None, ...]

    @property
    def ranks(self) -> int:
        return len(self.states)

    def record(self, rank: int) -> RankRecord | None:
        state = self.states[rank]
        return state and state.record

    def call(self, rank: int, number: int) -> Call | None:
        state = self.states[rank]
        return state and state.calls.get(number)

    def message(self, rank: int) -> Call | None:
        state = self.states[rank]
        return state and state.message


class Answers:
    """One rank's: what it does, to be told and asked for."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._lock, self._saying = threading.Lock(), threading.Lock()
        self._calls: dict[int, Call] = {}  # by number: what is under way, and some before it
        self._under_way: dict[int, int] = {}  # by ticket: the number
        self._begun, self._changed = 0, time.monotonic()
        self._where = -1, -1
        self._answered = 0
        self.message: Call | None = None
        with suppress(DistError):
            introduce(store, rank)

    # --- what this rank does

    def begin(self, ticket: int, call: Call) -> None:
        with self._lock:
            self._calls[call[0]] = call
            self._begun = max(self._begun, call[0] + 1)
            self._under_way[ticket] = call[0]
            if len(self._under_way) == 1:
                self._changed = time.monotonic()
            while len(self._calls) > CALLS + len(self._under_way):
                del self._calls[min(self._calls)]

    def waits(self, round_: int, peer: int) -> None:
        """In the collective under way."""
        self._where = round_, peer

    def end(self, ticket: int) -> None:
        with self._lock:
            self._under_way.pop(ticket, None)
            self._changed, self._where = time.monotonic(), (-1, -1)

    def state(self, *, closed: bool = False) -> State:
        with self._lock:
            finished = min(self._under_way.values(), default=self._begun)
            begun = min(self._begun, finished + 1)
            seconds, pid = time.monotonic() - self._changed, CLOSED if closed else os.getpid()
            record = RankRecord(pid, begun, finished, *self._where, seconds)
            known = {k: call for k, call in self._calls.items() if begun - CALLS <= k < begun}
            return State(record, self.message, known)

    # --- between ranks; DistError is raised where whoever served the store has gone

    def answer(self) -> None:
        """If somebody asks."""
        self._say(self._store.add("asked", 0))

    def last_word(self, *, closed: bool = False) -> None:
        """Of a rank whose communicator has failed or closes."""
        self._say(LAST, closed=closed)

    def survey(self, *, failed: bool, lost: int = -1) -> Survey:
        """What all do, as far as they say it within PATIENCE; their last words if it has failed.

        For a rank that is `lost` it does not wait.
        """
        found = {self._rank: self.state()}
        with suppress(DistError):
            asked = LAST if failed else self._store.add("asked", 1)
            self._say(asked)
            _hear(self._store, asked, self._ranks, found, lost)
        return Survey(tuple(found.get(rank) for rank in range(self._ranks)))

    def _say(self, asked: int, *, closed: bool = False) -> None:
        """Unless that has been answered."""
        with self._saying:
            if asked > self._answered:
                state = written(asked, self.state(closed=closed))
                self._store.set(f"state/{self._rank}", state)
                self._answered = asked


class Answering:
    """What makes a transport `Observed`: of the others it knows only what they are asked."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        """`store` is for this transport alone."""
        own = own_connection(store)
        self.rank, self.ranks = rank, ranks
        self._told = Told(own, rank, ranks, self._busy)
        self._does = Answers(own, rank, ranks)

    def _busy(self) -> bool:
        """Whether something that this rank has begun has not ended."""
        raise NotImplementedError

    def record(self, rank: int) -> RankRecord | None:
        return self._does.state().record if rank == self.rank else None

    def call(self, rank: int, number: int) -> Call | None:
        return self._does.state().calls.get(number) if rank == self.rank else None

    def message(self, rank: int) -> Call | None:
        return self._does.message if rank == self.rank else None

    def tell(self, call: Call | None) -> None:
        self._does.message = call

    def survey(self) -> Observed:
        failure = self._told.failure
        lost = failure.rank if failure and failure.kind is FailureKind.LOST else -1
        return self._does.survey(failed=failure is not None, lost=lost)

    def _listen(self) -> None:
        """A thread's: hear of failures, and answer."""
        with suppress(DistError):
            while self._told.failure is None:
                self._told.look()
                self._does.answer()
                with self._told.changed:
                    self._told.changed.wait_for(lambda: self._told.failure, LOOK)
            self._does.last_word()

    def _depart(self) -> None:
        with suppress(DistError):
            self._does.last_word(closed=True)
        self._told.leave()


def survey_from_outside(store: Store, ranks: int) -> Survey:
    """What the ranks of a transport do whose store that is."""
    found: dict[int, State] = {}
    asked = LAST if store.check(["failed"]) else store.add("asked", 1)
    _hear(store, asked, ranks, found, -1)
    return Survey(tuple(found[rank] for rank in range(ranks)))


def _hear(store: Store, asked: int, ranks: int, found: dict[int, State], lost: int) -> None:
    """Find what is missing, as far as it is said within PATIENCE; but do not wait for the lost."""
    pids = {rank: pid_of(store, rank) for rank in range(ranks)}
    until = time.monotonic() + PATIENCE
    while True:
        for rank in pids.keys() - found.keys():
            text = text_of(store, f"state/{rank}")
            if text and (state := read(text, asked, pids[rank], ranks)):
                found[rank] = state
        if not pids.keys() - found.keys() - {lost} or time.monotonic() > until:
            break
        time.sleep(PAUSE)
    for rank, pid in pids.items():
        found.setdefault(rank, State(RankRecord(pid, SILENT, SILENT, -1, -1, 0.0)))


def written(asked: int, state: State) -> str:
    pid, begun, finished, round_, waits_for, seconds = state.record
    numbers = asked, int(pid == CLOSED), begun, finished, round_, waits_for, int(1000 * seconds)
    lines = [" ".join(map(str, numbers)), said(state.message) if state.message else ""]
    return "\n".join(lines + [said(call) for call in state.calls.values()])


def read(text: str, asked: int, pid: int, ranks: int) -> State | None:
    """None for an answer that is older than `asked`, or makes no sense."""
    first, message, *calls = [*text.split("\n", CALLS + 2), ""]
    try:
        at, closed, begun, finished, round_, waits_for, ms = map(int, first.split())
    except ValueError:
        return None
    sizes = 0 <= finished <= begun < 1 << 62 and 0 <= ms < 1 << 62
    places = -1 <= round_ < 1 << 31 and -1 <= waits_for < ranks
    if not (len(text) <= LONGEST and at >= asked and sizes and places):
        return None
    known = [call for line in calls if (call := heard(line))]
    record = RankRecord(CLOSED if closed else pid, begun, finished, round_, waits_for, ms / 1000)
    return State(record, heard(message), {c[0]: c for c in known if c[0] < begun})
