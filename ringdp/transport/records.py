"""What a rank does and did last, as its peers and `ringdp doctor` read it, even while it is stuck.

csrc/record.hpp writes it: numbers, and text of a fixed size. Whatever else another process wrote
there, reading it here gives numbers and so many bytes, or nothing. Where ranks share no memory they
tell it one another: see `store.status`.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from ringdp._core import CALLS as CALLS  # how many calls a rank remembers
from ringdp._core import SITE_BYTES as SITE_BYTES
from ringdp._core import Records

CLOSED = -1  # for a pid: the rank has closed its communicator
ELSEWHERE = -2  # for a pid: the process cannot be seen from here, as on another host
SILENT = -1  # for begun and finished: the rank was asked, and has not answered


# One collective as a rank called it: its number, its fingerprint (comm/call.py), its elements, and
# the user's file:line in SITE_BYTES bytes, zeros at the end. Plain: a named tuple costs 0.2 µs.
Call = tuple[int, int, int, bytes]


class RankRecord(NamedTuple):
    """`begun` and `finished` count collectives; the one between them is under way."""

    pid: int  # 0: not attached yet; CLOSED; ELSEWHERE
    begun: int
    finished: int
    round: int  # of the collective under way, or -1
    waits_for: int  # a rank, or -1
    seconds: float  # since it began, or since the last one finished


class Observed(Protocol):
    """Where all ranks' records are read: in shared memory, from outside the job, or by asking."""

    @property
    def ranks(self) -> int: ...
    def record(self, rank: int) -> RankRecord | None:
        """What that rank does; None where it cannot be seen from here."""
        ...

    def call(self, rank: int, number: int) -> Call | None:
        """That rank's call of collective `number`, unless it has not called it, or forgot it."""
        ...

    def message(self, rank: int) -> Call | None:
        """The send or recv that that rank has told to wait for."""
        ...


def read_record(records: Records, rank: int) -> RankRecord:
    pid, begun, finished, round_, waits_for, changed = records.record(rank)
    seconds = time.clock_gettime(time.CLOCK_MONOTONIC) - changed / 1e9 if changed else 0.0
    return RankRecord(pid, begun, finished, round_, waits_for, max(0.0, seconds))


def said(call: Call) -> str:
    """As text, for a store."""
    number, kind, elements, site = call
    return f"{number} {kind} {elements} {site.hex()}"


def heard(text: str) -> Call | None:
    """None for what makes no sense."""
    try:
        number, kind, elements, site = text.split()
        call = int(number), int(kind), int(elements), bytes.fromhex(site)
    except ValueError:
        return None
    numbers = all(0 <= x < 1 << 64 for x in call[:3])
    return call if numbers and len(call[3]) == SITE_BYTES else None
