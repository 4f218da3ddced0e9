"""A collective algorithm as data: rounds of transfers, seen from above all ranks at once.

A schedule says WHAT moves where. It knows no sizes, dtypes, pointers or streams, so it is a value
that can be compared, cached by (algorithm, n), proved, drawn and run by any transport.

The four combinators (`then`, `beside`, `embed`, `transpose`) build schedules from schedules. They
check shapes only; `verify` proves what they build.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from ringdp.errors import ScheduleError, UsageError


class Transfer(NamedTuple):
    """Rank dst's chunk `write` becomes (`+=` if reduce, else `=`) rank src's chunk `read`.

    `src == dst` is local: nothing is sent. Chunk indices >= `Schedule.chunks` are scratch.
    """

    src: int
    dst: int
    read: int
    write: int
    reduce: bool

    def __str__(self) -> str:
        return f"{self.src}.{self.read} {'+>' if self.reduce else '->'} {self.dst}.{self.write}"


Round = tuple[Transfer, ...]


@dataclass(frozen=True)
class Schedule:
    """`rounds` of transfers that may happen at once, over `ranks` ranks of `chunks` chunks each.

    Within a round every read sees the slots as they were before it, and no slot is both read and
    written, so the order of transfers matters in one case only: several reduces into one slot are
    folded in the order in which they are listed.

    Rounds may be given as other sequences. Raises UsageError for what is no sequence of sequences
    of Transfers.
    """

    ranks: int
    chunks: int
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", _rounds(self.rounds))

    @property
    def scratch(self) -> int:
        """Scratch chunks that a rank needs beside its `chunks` chunks."""
        used = (max(t.read, t.write) for r in self.rounds for t in r)
        return max(0, max(used, default=-1) + 1 - self.chunks)

    def then(self, after: Schedule) -> Schedule:
        """This schedule, and after it `after` on the same chunks."""
        if (self.ranks, self.chunks) != (after.ranks, after.chunks):
            raise ScheduleError(
                f"then() joins schedules over the same ranks and chunks: {self.ranks} x "
                f"{self.chunks} was asked to go before {after.ranks} x {after.chunks}"
            )
        return Schedule(self.ranks, self.chunks, self.rounds + after.rounds)

    def beside(self, other: Schedule) -> Schedule:
        """Both at once on disjoint chunks: chunk c of `other` becomes chunk `self.chunks + c`."""
        if self.ranks != other.ranks:
            raise ScheduleError(
                f"beside() joins schedules over the same ranks: {self.ranks} and {other.ranks}"
            )
        chunks = self.chunks + other.chunks
        mine = [c if c < self.chunks else c + other.chunks for c in range(self._slots)]
        theirs = [
            c + self.chunks if c < other.chunks else c + self.chunks + self.scratch
            for c in range(other._slots)
        ]
        ranks = range(self.ranks)
        return Schedule.together(
            [
                Schedule(self.ranks, chunks, tuple(_rename(r, ranks, mine) for r in self.rounds)),
                Schedule(
                    self.ranks, chunks, tuple(_rename(r, ranks, theirs) for r in other.rounds)
                ),
            ]
        )

    @staticmethod
    def together(parts: Sequence[Schedule]) -> Schedule:
        """All at once on the same ranks and chunks: round r is every part's round r.

        For parts that touch different slots, as the rings inside different nodes do.
        """
        shapes = {(p.ranks, p.chunks) for p in parts}
        if len(shapes) != 1:
            raise ScheduleError(f"together() needs one shape of (ranks, chunks), got {shapes}")
        (ranks, chunks) = shapes.pop()
        rounds = zip_longest(*(p.rounds for p in parts), fillvalue=())
        return Schedule(ranks, chunks, tuple(tuple(t for r in rs for t in r) for rs in rounds))

    def embed(
        self,
        ranks: Sequence[int],
        chunks: Sequence[int] | Sequence[Sequence[int]],
        *,
        into: tuple[int, int] | None = None,
    ) -> Schedule:
        """The same algorithm under other names: rank r becomes `ranks[r]`, chunk c `chunks[c]`.

        `into` is the (ranks, chunks) of the schedule that holds it, by default this schedule's
        own: a reversed ring is `ring.embed(range(n)[::-1], range(n)[::-1])`, a ring inside one
        node of eight is `ring.embed([4, 5, 6, 7], range(4), into=(8, 4))`. Scratch stays scratch.
        Where `chunks[c]` is a sequence, chunk c is cut into those, and each transfer with it.
        """
        n, c = into or (self.ranks, self.chunks)
        pieces = [[x] if isinstance(x, int) else list(x) for x in chunks]
        _check_names("ranks", ranks, self.ranks, n)
        _check_names("chunks", [x for piece in pieces for x in piece], None, c)
        if len(pieces) != self.chunks or len({len(piece) for piece in pieces}) > 1:
            raise ScheduleError(
                f"embed() needs {self.chunks} chunks, cut into equally many: {list(chunks)}"
            )
        cuts = len(pieces[0])
        scratch = range(c, c + self.scratch * cuts)
        pieces += [list(scratch[s * cuts : (s + 1) * cuts]) for s in range(self.scratch)]
        return Schedule(
            n,
            c,
            tuple(
                tuple(t for cut in range(cuts) for t in _rename(r, ranks, [p[cut] for p in pieces]))
                for r in self.rounds
            ),
        )

    def transpose(self) -> Schedule:
        """Reverse time, swap source and destination, swap reduce and copy.

        See each transfer as a matrix; this is the transpose of their product. It turns a proved
        reduce-scatter into an all-gather and a broadcast into a reduce. It is exact only where a
        slot that was reduced from is dead afterwards: transpose, then verify.
        """
        return Schedule(
            self.ranks,
            self.chunks,
            tuple(
                tuple(Transfer(t.dst, t.src, t.write, t.read, not t.reduce) for t in r)
                for r in reversed(self.rounds)
            ),
        )

    @property
    def _slots(self) -> int:
        return self.chunks + self.scratch


def short(value: object) -> str:
    """Its repr, in one line that fits into another."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _rounds(given: object) -> tuple[Round, ...]:
    if isinstance(given, Transfer) or not isinstance(given, Iterable):
        raise UsageError(
            f"Schedule(rounds={short(given)}): allowed: a tuple of rounds, each a tuple of "
            "Transfers, as ((Transfer(...),),)"
        )
    return tuple(_round(r, transfers) for r, transfers in enumerate(given))


def _round(r: int, given: object) -> Round:
    if not isinstance(given, Transfer) and isinstance(given, Iterable):
        transfers = tuple(given)
        if all(isinstance(t, Transfer) for t in transfers):
            return transfers
    raise UsageError(
        f"Schedule: round {r} is {short(given)}; allowed: a tuple of Transfers, one of them as "
        "(Transfer(...),)"
    )


def _rename(transfers: Round, ranks: Sequence[int], chunks: Sequence[int]) -> Round:
    return tuple(
        Transfer(ranks[t.src], ranks[t.dst], chunks[t.read], chunks[t.write], t.reduce)
        for t in transfers
    )


def _check_names(what: str, names: Sequence[int], count: int | None, bound: int) -> None:
    wanted = len(names) if count is None else count
    if not (len(names) == len(set(names)) == wanted and all(0 <= x < bound for x in names)):
        raise ScheduleError(
            f"embed() needs {wanted} distinct {what} in 0..{bound - 1}, got {list(names)}"
        )
