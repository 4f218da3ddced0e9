"""What each rank is doing and did last, readable by its peers and `ringdp doctor` even in a hang.

csrc/record.hpp writes the records: numbers, and text of a fixed size. Whatever another process has
written there, a read gives numbers and that many bytes, or nothing. Ranks without shared memory
exchange the same facts through a store: see `store.status`.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from ringdp._core import CALLS as CALLS  # how many calls a rank remembers
from ringdp._core import SITE_BYTES as SITE_BYTES
from ringdp._core import Records
from ringdp._core import call_site as call_site  # the user's file:line now
from ringdp._core import learn_sites as learn_sites

CLOSED = -1  # as a pid: the rank has closed its communicator
ELSEWHERE = -2  # as a pid: the process is not visible from here, for instance on another host
SILENT = -1  # as begun and finished: the rank was asked and has not answered


# One collective as a rank called it: its number, its fingerprint (comm/call.py), its elements, and
# the user's file:line in SITE_BYTES bytes, padded with zeros. Not a NamedTuple, which costs 0.2 µs.
Call = tuple[int, int, int, bytes]


class RankRecord(NamedTuple):
    """What one rank is doing. `begun` and `finished` count collectives; one between is running."""

    pid: int  # 0: not attached yet; CLOSED; ELSEWHERE
    begun: int
    finished: int
    round: int  # of the running collective, or -1
    waits_for: int  # a rank, or -1
    seconds: float  # since the running collective began, or since the last one finished


class Observed(Protocol):
    """Read access to all ranks' records: in shared memory, from outside the job, or by asking."""

    ranks: int

    def record(self, rank: int) -> RankRecord | None:
        """Return that rank's record; None if it cannot be seen from here."""
        ...

    def call(self, rank: int, number: int) -> Call | None:
        """Return that rank's call of collective `number`; None if not yet made or forgotten."""
        ...

    def message(self, rank: int) -> Call | None:
        """Return the send or recv that that rank says it waits for."""
        ...


def read_record(records: Records, rank: int) -> RankRecord:
    pid, begun, finished, round_, waits_for, changed = records.record(rank)
    seconds = time.monotonic() - changed / 1e9 if changed else 0.0
    return RankRecord(pid, begun, finished, round_, waits_for, max(0.0, seconds))


def format_call(call: Call) -> str:
    """Return the call as text for a store."""
    number, kind, elements, site = call
    return f"{number} {kind} {elements} {site.hex()}"


def parse_call(text: str) -> Call | None:
    """Return the call, or None if the text is malformed."""
    try:
        number, kind, elements, site = text.split()
        call = int(number), int(kind), int(elements), bytes.fromhex(site)
    except ValueError:
        return None
    numbers = all(0 <= x < 1 << 64 for x in call[:3])
    return call if numbers and len(call[3]) == SITE_BYTES else None
