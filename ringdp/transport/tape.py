"""Decodes csrc's trace tapes (csrc/tape.hpp): collectives, their rows and tiles, and waits."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ringdp._core import CALL_CELLS, Progress

Tape = Progress  # it records a transport's work while it is traced
ENTRIES = 1 << 15  # capacity of a tape: about 0.3 s of 64 KiB tiles between reads
WHAT = ("row", "lay out", "read", "fold", "take", "collect", "wait", "call", "failed")
_WAIT, _CALL, _FAILED = (WHAT.index(name) for name in ("wait", "call", "failed"))
_CELL = 64  # bytes
_ENTRY = struct.Struct("4Q7iI")
_MORE = struct.Struct("5Q152s")


class Chunk(NamedTuple):
    """One row of a program on one slab, or one step of an exchange on one tile; times in ns."""

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
    piece: int  # index of the slab or tile
    waited: int  # of that time, for peers


class Ran(NamedTuple):
    """One collective on one rank, from its first to its last step; times in ns."""

    number: int
    elements: int
    kind: int
    site: bytes
    issued: int  # 0: before tracing began
    begin: int
    end: int
    waited: int  # of that time, for peers
    ticket: int
    rows: int  # address of its program's rows; 0 for an exchange
    background: bool
    ended: bool  # False: it failed


class Waited(NamedTuple):
    """One wait of a thread for a collective; times in ns."""

    ticket: int
    thread: int
    begin: int
    end: int


def read(tape: bytes) -> Iterator[Chunk | Ran | Waited]:
    """Yield the entries in the order in which they ended: a collective comes after its chunks."""
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
