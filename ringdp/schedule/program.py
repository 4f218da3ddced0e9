"""One rank's part of a schedule, as rows that a transport interprets in order.

A row may receive, reduce, store and send:

    value = received from recv_peer, or chunk src_chunk if there is no recv_peer
    if REDUCE: value = chunk dst_chunk + value
    if STORE:  chunk dst_chunk = value
    if send_peer: send value

Every NCCL primitive is a special case, and `Row.name` derives NCCL's name from a row. Messages
between two ranks arrive in the order sent, so rows carry no tags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringdp.errors import UsageError
from ringdp.schedule.ir import Schedule, Transfer

NONE = -1
REDUCE, STORE = 1, 2


class Row(NamedTuple):
    round: int
    recv_peer: int
    send_peer: int
    src_chunk: int
    dst_chunk: int
    flags: int

    @property
    def reads(self) -> set[int]:
        """The chunks that the row reads."""
        source = {self.src_chunk} if self.recv_peer == NONE else set()
        return source | ({self.dst_chunk} if self.flags & REDUCE else set())

    @property
    def writes(self) -> set[int]:
        return {self.dst_chunk} if self.flags & STORE else set()

    @property
    def name(self) -> str:
        """NCCL's name: recv, send, recv_reduce_copy_send, ...; `copy` and `reduce` are local."""
        parts = ["recv"] if self.recv_peer != NONE else []
        parts += ["reduce"] if self.flags & REDUCE else []
        if self.flags & STORE and (self.send_peer != NONE or self.flags & REDUCE or not parts):
            parts += ["copy"]
        parts += ["send"] if self.send_peer != NONE else []
        return "_".join(parts)


@dataclass(frozen=True, eq=False)
class Program:
    """The rows, int32[rows, 6], that carry out the part of `rank` in `schedule`."""

    rank: int
    schedule: Schedule
    rows: NDArray[np.int32]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.listed)

    @cached_property
    def listed(self) -> tuple[Row, ...]:
        return tuple(Row(*row) for row in self.rows.tolist())

    @cached_property
    def last_store(self) -> Mapping[int, int]:
        """Maps every chunk that is stored into to the last row that does so."""
        return {c: at for at, row in enumerate(self) for c in row.writes}

    @property
    def ranks(self) -> int:
        return self.schedule.ranks

    @property
    def chunks(self) -> int:
        """The number of chunks in a buffer, without scratch."""
        return self.schedule.chunks

    @cached_property
    def scratch(self) -> int:
        return max(0, int(self.rows[:, 3:5].max(initial=NONE)) + 1 - self.chunks)

    def with_rows(self, rows: Iterable[Row]) -> Program:
        return Program(self.rank, self.schedule, _table(rows))

    @cached_property
    def touched(self) -> frozenset[int]:
        """The chunks that need memory: those that rows name, or that give scratch its length."""
        named = {int(c) for c in self.rows[:, 3:5].flat if 0 <= c < self.chunks}
        return frozenset(named | set(self.incoming.values()))

    @cached_property
    def changes(self) -> bool:
        """Whether the program stores into a chunk that is not scratch."""
        return any(c < self.chunks for row in self for c in row.writes)

    @cached_property
    def incoming(self) -> Mapping[tuple[int, int], int]:
        """Maps (round, scratch chunk c) to the chunk that has the length of what c receives then.

        For transports that must know the length of a message before it arrives.
        """
        return {
            (r, t.write): source
            for r, t, source, target in _sized(self.schedule)
            if target is None and t.dst == self.rank != t.src
        }

    @cached_property
    def alike(self) -> tuple[tuple[int, int], ...]:
        """Pairs of chunks that must have equal lengths, since one is copied or added to the other.

        Of the built-in schedules only all_to_all has any, and its parts are equal.
        """
        pairs = {(a, b) for _, _, a, b in _sized(self.schedule) if b not in (None, a)}
        return tuple(sorted(pairs))

    @cached_property
    def staged(self) -> int:
        """The largest number of received chunks that any rank holds besides its own chunks.

        These are scratch, and data to be reduced into a chunk, which happens when it is next read.
        """
        most, staged = 0, [Counter[int]() for _ in range(self.ranks)]  # [rank][chunk written]
        for transfers in self.schedule.rounds:
            for t in transfers:
                if t.read < self.chunks:
                    staged[t.src].pop(t.read, None)
            for t in transfers:
                if t.src != t.dst and (t.reduce or t.write >= self.chunks):
                    staged[t.dst][t.write] += 1
            most = max(most, *(chunks.total() for chunks in staged))
        return most


def _table(rows: Iterable[Row]) -> NDArray[np.int32]:
    return np.array(list(rows), dtype=np.int32).reshape(-1, len(Row._fields))


def project(schedule: Schedule, rank: int) -> Program:
    """Return the program of `rank`: its rows, not fused.

    Within a round the k-th message of every channel has turn k, and in a turn sends come before
    receives. So there is an order over all ranks in which each send finds the slot of the previous
    one free: FIFOs of one slot suffice. The exception is several reduces into one slot: they keep
    the order listed, which can move a receive to a later turn than its send.

    Raises UsageError if the schedule has no such rank.
    """
    if not 0 <= rank < schedule.ranks:
        raise UsageError(f"rank is {rank}; allowed: 0 to {schedule.ranks - 1}")
    rows: list[Row] = []
    for r, transfers in enumerate(schedule.rounds):
        timed: list[tuple[int, bool, Row]] = []
        turns: Counter[tuple[str, int]] = Counter()  # the next turn of each channel and slot
        for t in transfers:
            if t.dst == rank:
                channel, slot = ("from", t.src), ("slot", t.write)
                at = max(turns[slot], turns[channel] if t.src != rank else 0)
                turns[slot], turns[channel] = at, at + 1
                source = (NONE, t.read) if t.src == rank else (t.src, NONE)
                flags = STORE | (REDUCE if t.reduce else 0)
                timed.append((at, True, Row(r, source[0], NONE, source[1], t.write, flags)))
            elif t.src == rank:
                timed.append((turns["to", t.dst], False, Row(r, NONE, t.dst, t.read, NONE, 0)))
                turns["to", t.dst] += 1
        rows += [row for _, _, row in sorted(timed, key=lambda item: item[:2])]
    return Program(rank, schedule, _table(rows))


def _sized(schedule: Schedule) -> Iterator[tuple[int, Transfer, int, int | None]]:
    """Yield (round, transfer, source, target) for every transfer.

    `source` and `target` are buffer chunks with the lengths of the slot read and the slot written.
    `target` is None for a copy to scratch, which takes any length.
    """
    like: dict[tuple[int, int], int] = {}  # (rank, scratch chunk) -> a chunk of that length
    for r, transfers in enumerate(schedule.rounds):
        for t in transfers:  # none reads a slot that another writes
            source, slot = like.get((t.src, t.read), t.read), (t.dst, t.write)
            copied = t.write >= schedule.chunks and not t.reduce
            yield r, t, source, None if copied else like.get(slot, t.write)
            if copied:
                like[slot] = source


def fuse(program: Program, live: Iterable[int] | None = None) -> Program:
    """Return an equivalent program with fewer rows and fewer passes over memory.

    1. A row that receives into chunk c and a later send of c become one streaming row.
    2. A row that receives into scratch and the only row that reads it become one.
    3. A store that is overwritten before it is read is dropped.

    A row moves only across rows that neither touch its chunk nor use its channel: moving a send
    past another send to the same peer would swap two messages. The fused ring all-reduce has
    2n - 1 rows, like NCCL's. `live` are the chunks whose final value matters, by default all.
    """
    rows = _join_recv_send(_join_recv_read(list(program), program.chunks))
    return program.with_rows(
        _drop_dead_stores(rows, set(range(program.chunks) if live is None else live))
    )


def _join_recv_send(rows: list[Row]) -> list[Row]:
    out: list[Row] = []
    for row in rows:
        if row.send_peer != NONE:
            at = _last(out, sends_to=row.send_peer, writes=row.src_chunk)
            if at is not None and out[at].recv_peer != NONE == out[at].send_peer:
                out[at] = out[at]._replace(send_peer=row.send_peer)  # it receives row.src_chunk
                continue
        out.append(row)
    return out


def _join_recv_read(rows: list[Row], chunks: int) -> list[Row]:
    users = Counter(c for row in rows for c in row.reads | row.writes)
    out: list[Row] = []
    for row in rows:
        part = row.src_chunk
        if row.recv_peer == NONE and part >= chunks and users[part] == 2:
            at = _last(out, writes=part)
            peer = NONE if at is None else out[at].recv_peer
            if at is not None and peer != NONE and _last(out, receives_from=peer) == at:
                del out[at]
                row = row._replace(recv_peer=peer, src_chunk=NONE)
        out.append(row)
    return out


def _drop_dead_stores(rows: list[Row], live: set[int]) -> list[Row]:
    out: list[Row] = []
    for row in reversed(rows):
        if row.send_peer != NONE and not row.writes & live:
            row = row._replace(flags=row.flags & ~STORE)
        live = (live - row.writes) | row.reads
        out.append(row)
    return out[::-1]


def _last(
    rows: list[Row], *, sends_to: int = NONE, receives_from: int = NONE, writes: int = NONE
) -> int | None:
    """Return the index of the last row that uses the channel or writes the chunk, or None."""
    for at in range(len(rows) - 1, -1, -1):
        row = rows[at]
        if (
            NONE != sends_to == row.send_peer
            or NONE != receives_from == row.recv_peer
            or writes in row.writes
        ):
            return at
    return None
