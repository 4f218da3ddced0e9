"""Plans a program as groups of NCCL calls with folds between them. Pure: no buffer, no device.

A round of the schedule becomes one Round: folds and copies of data that is already there, then one
group of sends and receives. A received value that is to be added waits in a place of its own until
the sum is read. Then all values that wait for it are added in one fold, in program order. So a fold
is one pass, and 16-bit floats are rounded where every transport rounds them.

Places are numbers: 0 ... chunks - 1 are the buffer's chunks, the others are rows of staging. A plan
contains no lengths: it runs on a tile, the same stretch of every chunk, as on the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import count, groupby
from typing import NamedTuple

from ringdp.schedule.program import NONE, REDUCE, Program, Row


class Fold(NamedTuple):
    """Sets place `out` to the op over `parts`, in their order. One part: a copy."""

    out: int
    parts: tuple[int, ...]  # in our own algorithms, staged parts are adjacent rows
    like: int  # a chunk of the same length as each of them


class Call(NamedTuple):
    """One ncclSend or ncclRecv of a place, from or to `peer`."""

    peer: int
    place: int
    like: int


class Round(NamedTuple):
    """A round of the schedule, as one rank sees it: `folds`, in their order, then one group of
    calls."""

    number: int
    folds: tuple[Fold, ...]
    sends: tuple[Call, ...]
    receives: tuple[Call, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """Rounds over `chunks` chunks and `rows` rows of staging, in order.

    A rank's plan omits rounds in which it has nothing to do. A message is in the same round on both
    ends, and at the same position among the messages of its channel in that round.
    """

    chunks: int
    rows: int
    rounds: tuple[Round, ...]


@lru_cache(maxsize=1024)
def plan(program: Program) -> Plan:
    """The plan of a program whose rows are those of its schedule's rounds: see
    `Program.incoming`."""
    making = _Making(program)
    for round_, rows in groupby(program, key=lambda row: row.round):
        making.add(round_, list(rows))
    making.end()
    return _laid_out(making)


class _Making:
    """Builds the rounds one by one, tracking the place of every chunk."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = {c: c for c in range(program.chunks)}  # chunk or scratch chunk -> its place
        self.like = dict(self.at)  # place -> a chunk of the same length
        self.waiting: dict[int, list[int]] = {}  # chunk -> places to add to it
        self.rounds = list[Round]()
        self.folds = list[Fold]()  # of the round that is being built
        self._rows = list(program)
        self._new = count(program.chunks)

    def add(self, round_: int, rows: list[Row]) -> None:
        for row in rows:
            if row.recv_peer == NONE and not self._moves_home(row):
                self._settle(row.src_chunk)
        sends, receives = [], []
        for row in rows:
            if row.send_peer != NONE:
                sends.append(self._call(row.send_peer, self.at[row.src_chunk]))
            elif row.recv_peer == NONE:
                self._local(row)
            else:
                receives.append(self._call(row.recv_peer, self._received(round_, row)))
        self._round(round_, tuple(sends), tuple(receives))

    def end(self) -> None:
        """Fold all values that still wait."""
        for chunk in range(self.program.chunks):
            self._settle(chunk)
        self._round(self._rows[-1].round + 1 if self._rows else 0, (), ())

    def _round(self, round_: int, sends: tuple[Call, ...], receives: tuple[Call, ...]) -> None:
        if self.folds or sends or receives:
            self.rounds.append(Round(round_, tuple(self.folds), sends, receives))
        self.folds = []

    def _call(self, peer: int, place: int) -> Call:
        return Call(peer, place, self.like[place])

    def _fold(self, out: int, *parts: int) -> None:
        self.folds.append(Fold(out, parts, self.like[out]))

    def _settle(self, chunk: int) -> None:
        """Fold the values that wait for `chunk`. Called before the chunk is read."""
        if parts := self.waiting.pop(chunk, None):
            self._keep(self.at[chunk])
            self._fold(self.at[chunk], self.at[chunk], *parts)

    def _received(self, round_: int, row: Row) -> int:
        chunk = row.dst_chunk
        if row.flags & REDUCE:
            place = self._place(self.like[self.at[chunk]])
            self.waiting.setdefault(chunk, []).append(place)
            return place
        return self._overwritten(chunk, self.program.incoming.get((round_, chunk), chunk))

    def _local(self, row: Row) -> None:
        source, target = row.src_chunk, row.dst_chunk
        if row.flags & REDUCE:
            self.waiting.setdefault(target, []).append(self.at[source])
            return
        parts = (self.at[source], *self.waiting.pop(source, ()))  # several only if `_moves_home`
        place = self._overwritten(target, self.like[self.at[source]])
        self._fold(place, *parts)

    def _moves_home(self, row: Row) -> bool:
        """Whether the row copies a scratch chunk locally that no later row reads: then its sum can
        be computed directly at the destination."""
        source = row.src_chunk
        if row.send_peer != NONE or row.flags & REDUCE or source < self.program.chunks:
            return False
        return not any(
            source in other.reads
            for other in self._rows
            if other.round >= row.round and other != row
        )

    def _overwritten(self, chunk: int, like: int) -> int:
        """The place for a new value of `chunk`, of the length of chunk `like`."""
        self.waiting.pop(chunk, None)
        if chunk >= self.program.chunks:  # a new place: the old value may still be read
            self.at[chunk] = self._place(like)
        else:
            self._keep(self.at[chunk])
        return self.at[chunk]

    def _keep(self, place: int) -> None:
        """Copy a place before it is overwritten, if its old value still waits to be added."""
        if any(place in parts for parts in self.waiting.values()):
            kept = self._place(self.like[place])
            self._fold(kept, place)
            for parts in self.waiting.values():
                parts[:] = [kept if p == place else p for p in parts]

    def _place(self, like: int) -> int:
        place = next(self._new)
        self.like[place] = like
        return place


def _laid_out(making: _Making) -> Plan:
    """The plan with places mapped to rows of staging: the parts of one fold get adjacent rows, the
    other places reuse rows that are free."""
    chunks, rounds = making.program.chunks, making.rounds
    row: dict[int, int] = {c: c for c in range(chunks)}
    for fold in (f for one in rounds for f in one.folds):
        staged = {p: None for p in fold.parts if p >= chunks}  # a dict, as a part may occur twice
        if len(staged) > 1 and not any(p in row for p in staged):
            row |= {p: len(row) + i for i, p in enumerate(staged)}
    first = len(row)
    # For every round, the places that its folds use, then those of its calls, which follow them.
    turns = [places for one in rounds for places in (_folded(one), _called(one))]
    last = {p: i for i, places in enumerate(turns) for p in places}
    until: dict[int, int] = {}  # reusable row (from `first` on) -> the last turn that uses it
    for i, places in enumerate(turns):
        for place in sorted(places - row.keys()):
            free = [r for r, end in until.items() if end < i]
            row[place] = min(free, default=first + len(until))
            until[row[place]] = last[place]
    renamed = tuple(_renamed(one, row) for one in rounds)
    return Plan(chunks, first + len(until) - chunks, renamed)


def _folded(one: Round) -> set[int]:
    return {p for fold in one.folds for p in (fold.out, *fold.parts)}


def _called(one: Round) -> set[int]:
    return {call.place for call in (*one.sends, *one.receives)}


def _renamed(one: Round, row: dict[int, int]) -> Round:
    return Round(
        one.number,
        tuple(f._replace(out=row[f.out], parts=tuple(row[p] for p in f.parts)) for f in one.folds),
        tuple(c._replace(place=row[c.place]) for c in one.sends),
        tuple(c._replace(place=row[c.place]) for c in one.receives),
    )
