"""What ranks without shared memory are doing: each publishes its status to the store when asked.

    place/RANK   its process, recorded when it arrived: see `handshake`
    asked        counts the requests for status
    state/RANK   the value of `asked` that this status answers and the numbers of its RankRecord on
                 one line, its message or an empty line, and its last calls, one per line

A thread of every rank polls for requests, so a rank in the user's code answers, too. A rank that
fails or closes publishes a last status, which answers all later requests. A stopped or dead rank
does not answer; its process, if visible, shows which it is. Readers trust nothing: a malformed
status counts as no answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ringdp.transport.records import (
    CALLS,
    CLOSED,
    ELSEWHERE,
    SILENT,
    Call,
    Observed,
    RankRecord,
    format_call,
    parse_call,
)
from ringdp.transport.store.client import StoreClient
from ringdp.transport.store.failures import LOOK, Failures
from ringdp.transport.store.processes import pid_of, text_of

PATIENCE = 0.4  # seconds that an answer may take: ranks poll every 0.1 s
PAUSE = 0.01  # seconds between looks for answers
LAST = 1 << 62  # as `asked`: a last status
AHEAD = CALLS // 2  # published calls that are queued behind the running collective
LONGEST = 32 << 10  # bytes of an answer


class State(NamedTuple):
    """A rank's published status."""

    record: RankRecord
    message: Call | None = None
    calls: Mapping[int, Call] = {}


class Survey(Observed):
    """The status of all ranks at one moment."""

    def __init__(self, states: Sequence[State]) -> None:
        self.ranks, self.states = len(states), states

    def record(self, rank: int) -> RankRecord:
        return self.states[rank].record

    def call(self, rank: int, number: int) -> Call | None:
        return self.states[rank].calls.get(number)

    def message(self, rank: int) -> Call | None:
        return self.states[rank].message


class StatusBoard:
    """One rank's own status, and its access to the others'."""

    def __init__(self, store: StoreClient, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._pids = dict.fromkeys(range(ranks), ELSEWHERE)  # as last read from the store
        # Reentrant: a transport may be collected, and so end, while this very thread holds them.
        self._lock, self._publishing = threading.RLock(), threading.RLock()
        # The caller of a collective assigns both: see Note [Ctrl-C comes after any call].
        self.calls: dict[int, tuple[Call, float]] = {}  # number -> call, and when it was started
        self.begun = 0
        self._finished, self._ended = 0, set[int]()  # all below it have ended, and these later ones
        self._changed = time.monotonic()
        self._where = -1, -1
        self._answered = 0
        self.message: Call | None = None

    # --- this rank's status

    def waits(self, round_: int, peer: int) -> None:
        """Record the round of the running collective, and the peer that it waits for."""
        self._where = round_, peer

    def end(self, number: int) -> None:
        """Record that this collective has ended, perhaps before earlier ones."""
        with self._lock:
            self._ended.add(number)
            while self._finished in self._ended:
                self._ended.remove(self._finished)
                self.calls.pop(self._finished - CALLS, None)
                self._finished += 1
            self._changed, self._where = time.monotonic(), (-1, -1)

    def under_way(self) -> int | None:
        """Return the number of the running collective, or None."""
        return self._finished if self._finished < self.begun else None

    def state(self, *, closed: bool = False) -> State:
        """Return this rank's status now."""
        with self._lock:
            finished, last = self._finished, min(self.begun, self._finished + 1 + AHEAD)
            known = {k: self.calls[k] for k in range(max(0, last - CALLS), last)}
            since = max(self._changed, known[finished][1] if finished in known else 0.0)
            record = RankRecord(
                CLOSED if closed else os.getpid(),
                min(self.begun, finished + 1),
                finished,
                *self._where,
                time.monotonic() - since,
            )
            return State(record, self.message, {k: call for k, (call, _) in known.items()})

    # --- between ranks; these raise DistError if the store has gone or does not answer

    def read_pids(self) -> None:
        """Read where the other ranks' processes are, for reports after the store has gone."""
        self._pids = self._store.ask(partial(_pids, ranks=self._ranks))

    def answer(self) -> None:
        """Publish this rank's status if a request is unanswered."""
        self._publish(self._store.ask(lambda store: store.add("asked", 0)))

    def publish_last(self, *, closed: bool = False) -> None:
        """Publish the last status of a rank whose communicator has failed or closes."""
        self._publish(LAST, closed=closed)

    def survey(self, *, failed: bool, lost: int = -1) -> Survey:
        """Return the status of all ranks that answer within PATIENCE, without waiting for `lost`.

        If the communicator has `failed`, only a last status counts as an answer.
        """
        found = {self._rank: self.state()}
        with suppress(DistError):
            self.read_pids()
            asked = LAST if failed else self._store.ask(lambda store: store.add("asked", 1))
            self._publish(asked)
            _collect(self._store, asked, self._pids, found, lost)
        return _survey(self._pids, found)

    def _publish(self, asked: int, *, closed: bool = False) -> None:
        """Publish this rank's status as the answer to request `asked`, unless it is answered."""
        with self._publishing:
            if asked > self._answered:
                self._answered = asked
                key, state = f"state/{self._rank}", written(asked, self.state(closed=closed))
                self._store.ask(lambda store: store.set(key, state), later=True)


def listen(failures: Failures, board: StatusBoard) -> None:
    """Poll the store for failures and requests until a failure, on one thread per transport."""
    with suppress(DistError):
        board.read_pids()
    while failures.failure is None:
        failures.poll(board.under_way())
        with suppress(DistError):
            board.answer()
        failures.wait(LOOK)
    with suppress(DistError):
        board.publish_last()


def survey_from_outside(store: StoreClient, ranks: int) -> Survey:
    """Return the status of the ranks of the transport that uses this store. Raises DistError if the
    store has gone or does not answer."""
    found: dict[int, State] = {}
    failed = store.ask(lambda s: s.check(["failed"]))
    asked = LAST if failed else store.ask(lambda s: s.add("asked", 1))
    pids = store.ask(partial(_pids, ranks=ranks))
    _collect(store, asked, pids, found, -1)
    return _survey(pids, found)


def _survey(pids: Mapping[int, int], found: Mapping[int, State]) -> Survey:
    silent = [State(RankRecord(pid, SILENT, SILENT, -1, -1, 0.0)) for pid in pids.values()]
    return Survey(tuple(found.get(rank, state) for rank, state in enumerate(silent)))


def _collect(
    store: StoreClient, asked: int, pids: Mapping[int, int], found: dict[int, State], lost: int
) -> None:
    """Add the missing ranks' answers to `found` until PATIENCE is over, not waiting for `lost`."""
    until = time.monotonic() + PATIENCE
    while True:
        last = time.monotonic() > until  # before the look: this rank may itself have been stopped
        for rank, text in store.ask(partial(_texts, pids.keys() - found.keys())).items():
            if state := read(text, asked, pids[rank], len(pids)):
                found[rank] = state
        if not pids.keys() - found.keys() - {lost} or last:
            break
        time.sleep(PAUSE)


def _pids(store: Store, ranks: int) -> dict[int, int]:
    return {rank: pid_of(store, rank) for rank in range(ranks)}


def _texts(ranks: Iterable[int], store: Store) -> dict[int, str]:
    return {rank: text_of(store, f"state/{rank}") for rank in ranks}


def written(asked: int, state: State) -> str:
    pid, begun, finished, round_, waits_for, seconds = state.record
    numbers = asked, int(pid == CLOSED), begun, finished, round_, waits_for, int(1000 * seconds)
    lines = [" ".join(map(str, numbers)), format_call(state.message) if state.message else ""]
    return "\n".join(lines + [format_call(call) for call in state.calls.values()])


def read(text: str, asked: int, pid: int, ranks: int) -> State | None:
    """Return a rank's status, or None if it is older than request `asked` or malformed."""
    first, message, *calls = [*text.split("\n", CALLS + 2), ""]
    try:
        at, closed, begun, finished, round_, waits_for, ms = map(int, first.split())
    except ValueError:
        return None
    sizes = 0 <= finished <= begun < 1 << 62 and 0 <= ms < 1 << 62
    places = -1 <= round_ < 1 << 31 and -1 <= waits_for < ranks
    if not (len(text) <= LONGEST and at >= asked and sizes and places):
        return None
    known = [call for line in calls if (call := parse_call(line))]
    record = RankRecord(CLOSED if closed else pid, begun, finished, round_, waits_for, ms / 1000)
    return State(record, parse_call(message), {c[0]: c for c in known if c[0] < begun + AHEAD})
