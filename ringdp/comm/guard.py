"""Finds out why a collective does not finish; its errors name the ranks, the calls and the lines.

Every message carries the number and fingerprint of its collective, and every rank's record says
what it called and where. So ranks that called different collectives notice this in the first
message or, if each waits for the other's message, in the records. And every rank can report what
all others are doing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from copy import copy
from typing import NoReturn

from ringdp.comm.call import ANY_RANK, MESSAGES, collective_of, describe, dtype_of, peer_of, tag_of
from ringdp.comm.table import missing, table
from ringdp.errors import CollectiveTimeout, CommunicationError
from ringdp.transport.base import ERRORS, MESSAGE, Failure, FailureKind, Stamp, Transport
from ringdp.transport.records import CALLS, SILENT, Call, Observed
from ringdp.transport.store.processes import has_ended, process_state
from ringdp.transport.threads import Living

log = logging.getLogger("ringdp")

UNEVEN = {"all_to_all_v"}  # their lengths may differ between ranks


class Guard:
    """Raises a transport's failures as errors, and looks for their causes while a rank waits."""

    def __init__(
        self,
        transport: Transport,
        warn_after: float,
        duplicates: Iterable[Transport] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        """`warn_after`: seconds until a warning about a collective that has not finished.
        `duplicates`: the transports of all duplicates, including this one. `ranks`: their numbers
        in the job."""
        self.transport, self.warn_after, self.duplicates = transport, warn_after, duplicates
        self.ranks = ranks
        self.units: Sequence[str] = ()  # names of units by tag
        self.together = Living[Guard]()  # once this communicator has failed, theirs have
        # Only copies are raised: a traceback would keep the callers' frames and tensors alive.
        self.error: CommunicationError | None = None

    def check(self, call: Call) -> None:
        """Raises the transport's failure, if it has failed."""
        if self.error is None and (failure := self.transport.failure()):
            self._end(self._error(call, failure))
        if self.error is not None:
            raise copy(self.error)

    def look(self, call: Call) -> None:
        """Raises if `call` cannot finish: on a failure, or if a rank called another collective."""
        self.check(call)
        if collective_of(call[1]) in MESSAGES:
            self.transport.tell(call)
        self._compare(call, self.transport)

    def _compare(self, call: Call, seen: Observed) -> None:
        rank = self.transport.rank
        here = seen.record(rank)
        own_call = here and seen.call(rank, here.begun - 1)
        if own_call is None:
            return
        for r in range(seen.ranks):
            other_call = seen.call(r, own_call[0])
            if other_call is not None and differ(own_call, other_call):
                self.transport.fail(FailureKind.MISMATCH, r)
                self.check(call)

    def left(self, call: Call) -> None:
        """Tell other ranks that this one no longer waits for `call`, for which it called `look`."""
        if collective_of(call[1]) in MESSAGES:
            self.transport.tell(None)

    def warn(self, call: Call, waited: float) -> None:
        """Log that a collective is slow and which ranks are missing. Raises if it cannot finish."""
        seen = self.transport.survey()
        self._compare(call, seen)
        log.warning(
            "rank %d has waited %.1f s for %s; %s\n%s",
            *(self.transport.rank, waited, describe(call, self.units), self._missing(call, seen)),
            self._table(seen),
        )

    def give_up(self, call: Call, waited: float) -> NoReturn:
        """Tell the other ranks, and raise CollectiveTimeout, or CollectiveMismatch if it is one."""
        seen = self.transport.survey()
        self._compare(call, seen)
        self.transport.fail(FailureKind.TIMEOUT, self.transport.rank)
        error = CollectiveTimeout(
            f"{self._waits(call)} until the timeout of {waited:g} s; {self._missing(call, seen)}\n"
            f"{self._table(seen)}"
        )
        self._end(error)
        raise copy(error)

    def check_closing(self, issued: int) -> None:
        """Raises a known failure of the `issued` collectives on other ranks that no call raised."""
        if self.error is not None:
            return
        last = self.transport.call(self.transport.rank, issued - 1)
        if last is None:
            return
        self.check(last)
        for r in range(self.transport.ranks):
            if self._died_before(r, issued):
                self.transport.fail(FailureKind.LOST, r)
                self.check(last)

    def _end(self, error: CommunicationError) -> None:
        self.error = error
        for each in self.together:
            if each.error is None:
                each.error = error
                each.transport.fail(FailureKind.ABORTED, each.transport.rank)

    def _died_before(self, rank: int, issued: int) -> bool:
        """Return whether the rank's process ended before it finished `issued` collectives."""
        record = self.transport.record(rank)
        if record is None or not has_ended(record.pid):
            return False
        last = self.transport.record(rank)  # again: it may have finished more before it ended
        return last is not None and last.pid == record.pid and last.finished < issued

    def _error(self, call: Call, failure: Failure) -> CommunicationError:
        seen = self.transport.survey()
        if failure.kind is FailureKind.MISMATCH:
            text = _disagreement(failure, seen, self.units)
        else:
            more = self._more(call, failure, seen)
            text = f"{self._waits(call)}; {failure.cause}{more}"
        return ERRORS[failure.kind](f"{text}\n{self._numbers()}{table(seen)}")

    def _more(self, call: Call, failure: Failure, seen: Observed) -> str:
        """What the ranks' records add to the cause."""
        if failure.kind is FailureKind.TIMEOUT:
            return f"; {self._missing(call, seen)}"
        record = seen.record(failure.rank) if failure.kind is FailureKind.LOST else None
        state = process_state(record.pid) if record else ""
        return f" ({state})" * bool(state)

    def _table(self, seen: Observed) -> str:
        duplicates = [t.survey() for t in list(self.duplicates) if t is not self.transport]
        return self._numbers() + table(seen, duplicates, self.transport.rank)

    def _numbers(self) -> str:
        """A line that tells the ranks' numbers in the job, if these are others."""
        others = [f"{r} is {number} of the job" for r, number in enumerate(self.ranks)]
        return f"ranks here: {', '.join(others)}\n" * ([*self.ranks] != [*range(len(others))])

    def _waits(self, call: Call) -> str:
        behind = self._stuck(call) < call[0] and collective_of(call[1]) not in MESSAGES
        queued = f" (queued behind #{self._stuck(call)})" * behind
        return f"rank {self.transport.rank} waited for {describe(call, self.units)}{queued}"

    def _missing(self, call: Call, seen: Observed) -> str:
        if collective_of(call[1]) in MESSAGES:
            return _unmatched(call[1], seen)
        return missing(seen, self._stuck(call), self.transport.rank)

    def _stuck(self, call: Call) -> int:
        """Return the number of the running collective: this one or one that it is queued behind."""
        here = self.transport.record(self.transport.rank)
        return min(call[0], here.finished) if here else call[0]


def _disagreement(failure: Failure, seen: Observed, units: Sequence[str]) -> str:
    """Describe both calls of the first collective that differs, or else the unexpected message."""
    pair = failure.reporter, failure.rank
    if failure.found[0] == MESSAGE:
        return _message_mismatch(failure)
    here, there = [_calls(r, seen) for r in pair]
    both = sorted(here.keys() & there.keys())
    differing = [k for k in both if differ(here[k], there[k])]
    number = differing[0] if differing else failure.expected[0]
    lines = [f"ranks {pair[0]} and {pair[1]} called differently:"]
    for r, calls in zip(pair, (here, there), strict=True):
        call = calls.get(number)
        text = describe(call, units) if call else f"#{number}, {_why_unknown(r, seen)}"
        lines.append(f"  rank {r}: {text}")
    kinds = [calls[number][1] for calls in (here, there) if number in calls]
    if {*map(collective_of, kinds)} == {"all_to_all", "all_to_all_v"}:
        lines.append("  give sizes of parts, also if they are equal, on every rank or on none")
    if len({*map(tag_of, kinds)}) > 1 and units:
        lines.append(
            "  all ranks use units in one order: let what differs by rank, such as experts, lie in "
            "one unit, and what some call more often run within full_parameters()"
        )
    if failure.expected == failure.found and not differing:
        lines.append("  with different sizes")
    elif not differing:
        lines.append(
            f"  rank {pair[0]} found a {_message(failure.found)} from rank {pair[1]} "
            f"where it expected a {_message(failure.expected)}"
        )
    return "\n".join(lines)


def _calls(rank: int, seen: Observed) -> dict[int, Call]:
    """Return the rank's last calls and those queued behind them, by number."""
    record = seen.record(rank)
    begun = record.begun if record else 0
    calls = (seen.call(rank, k) for k in range(max(0, begun - CALLS), begun + CALLS))
    return {call[0]: call for call in calls if call}


def _why_unknown(rank: int, seen: Observed) -> str:
    record = seen.record(rank)
    return "too long ago to say" if record and record.begun != SILENT else "it gives no answer"


def _unmatched(kind: int, seen: Observed) -> str:
    """Describe what the other end of a message has not done, and the state of its process."""
    done = "received" if collective_of(kind) == "send" else "sent"
    if peer_of(kind) == ANY_RANK:
        return f"no rank has {done} it"
    record = seen.record(peer_of(kind))
    state = process_state(record.pid) if record else ""
    return f"rank {peer_of(kind)}" + f" ({state})" * bool(state) + f" has not {done} it"


def differ(one: Call, other: Call) -> bool:
    """Return whether two ranks' calls with the same number are different collectives."""
    (_, kind, elements, _), (_, other_kind, other_elements, _) = one, other
    even = collective_of(kind) not in UNEVEN
    return kind != other_kind or (even and elements != other_elements)


def _message_mismatch(failure: Failure) -> str:
    (_, kind, size), (_, other, given) = failure.expected, failure.found
    return (
        f"rank {failure.reporter} expected {size} bytes of {dtype_of(kind)} with tag "
        f"{tag_of(kind)} from rank {failure.rank}, which sent {given} bytes of {dtype_of(other)}"
    )


def _message(stamp: Stamp) -> str:
    number, _, size = stamp
    return f"message of {size} bytes of collective #{number}"


def log_unraised(transport: Transport, call: Call, failure: Failure) -> None:
    """Log, when the process exits, a failure that no call has raised."""
    error = Guard(transport, math.inf)._error(call, failure)
    log.error("at exit, which no call has raised: %s: %s", type(error).__name__, error)
