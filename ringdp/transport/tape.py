"""What csrc's tapes say (csrc/tape.hpp), as tuples: collectives, their rows and tiles, waits."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from ringdp._core import CALL_CELLS

ENTRIES = 1 << 15  # room of one tape: some 0.3 s of tiles of 64 KiB until it is emptied
WHAT = ("row", "lay out", "read", "fold", "take", "collect", "wait", "call", "failed")
_WAIT, _CALL, _FAILED = (WHAT.index(name) for name in ("wait", "call", "failed"))
_CELL = 64  # bytes
_ENTRY = struct.Struct("4Q7iI")
_MORE = struct.Struct("5Q152s")


class Chunk(NamedTuple):
    """A row of a program on one slab of its chunks, or a step on one tile; times in ns."""

    number: int  # of its collective
    what: str
    begin: int
    end: int
    bytes: int
    round: int
    sender: int  # peers and chunks: -1 for none
    to: int
    src: int
    dst: int
    piece: int  # which slab or tile
    waited: int  # for peers


class Ran(NamedTuple):
    """A collective on one rank, from its first to its last step; times in ns."""

    number: int
    elements: int
    kind: int
    site: bytes
    issued: int  # 0: before the trace
    begin: int
    end: int
    waited: int  # of it for peers
    ticket: int
    rows: int  # address of its program's rows; 0 for the transport's own way
    background: bool
    ended: bool  # False: it failed


class Waited(NamedTuple):
    """A thread waited for a collective."""

    ticket: int
    thread: int
    begin: int
    end: int


class Tape(Protocol):
    """Where a transport keeps what it does while it is traced: csrc's Progress."""

    def trace(self, entries: int, /) -> None: ...
    def untrace(self) -> None: ...
    def tape(self) -> tuple[bytes, bytes, int]: ...


def read(tape: bytes) -> Iterator[Chunk | Ran | Waited]:
    """In the order in which they ended: the chunks of a collective come before it."""
    at = 0
    while at < len(tape):
        begin, end, number, size, what, round_, sender, to, src, dst, piece, waited = (
            _ENTRY.unpack_from(tape, at)
        )
        if what == _WAIT:
            yield Waited(number, src, begin, end)
        elif what in (_CALL, _FAILED):
            more = _MORE.unpack_from(tape, at + _CELL)
            issued, ticket, kind, rows, background, site = more
            yield Ran(
                *(number, size, kind, site, issued, begin, end, waited * 100, ticket, rows),
                background=bool(background),
                ended=what == _CALL,
            )
            at += (CALL_CELLS - 1) * _CELL
        else:
            name, ns = WHAT[what], waited * 100
            yield Chunk(number, name, begin, end, size, round_, sender, to, src, dst, piece, ns)
        at += _CELL
