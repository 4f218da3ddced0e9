"""A collective algorithm as data: rounds of transfers that cover all ranks at once.

A schedule says WHAT moves where. It has no sizes, dtypes, pointers or streams, so it is a plain
value: it can be compared, cached by (algorithm, n), proved, drawn, and run by any transport.

The four combinators (`then`, `beside`, `embed`, `transpose`) build schedules from schedules. They
check shapes only; `verify` proves the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from ringdp.errors import ScheduleError, UsageError


class Transfer(NamedTuple):
    """Rank src's chunk `read` is copied to rank dst's chunk `write`, or added to it if `reduce`.

    If `src == dst`, the transfer is local: nothing is sent. Chunk indices >= `Schedule.chunks` are
    scratch.
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
    """Rounds of transfers over `ranks` ranks with `chunks` chunks each.

    The transfers of a round may happen at once. Every read sees the slots, which are the chunks of
    all ranks, as they were before the round, and no slot is both read and written. So the order of
    transfers matters in one case only: reduces into one slot are folded in the order listed.

    `rounds` may be any sequence of sequences of Transfers. Raises UsageError if it is not one.
    """

    ranks: int
    chunks: int
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", _rounds(self.rounds))

    @property
    def scratch(self) -> int:
        """The number of scratch chunks that a rank needs besides its `chunks` chunks."""
        used = (max(t.read, t.write) for r in self.rounds for t in r)
        return max(0, max(used, default=-1) + 1 - self.chunks)

    def then(self, after: Schedule) -> Schedule:
        """Run this schedule, then `after`, on the same chunks."""
        if (self.ranks, self.chunks) != (after.ranks, after.chunks):
            raise ScheduleError(
                f"then() joins schedules over the same ranks and chunks, got {self.ranks} x "
                f"{self.chunks} and {after.ranks} x {after.chunks}"
            )
        return Schedule(self.ranks, self.chunks, self.rounds + after.rounds)

    def beside(self, other: Schedule) -> Schedule:
        """Run both at once on disjoint chunks: chunk c of `other` becomes `self.chunks + c`."""
        if self.ranks != other.ranks:
            raise ScheduleError(
                f"beside() joins schedules over the same ranks, got {self.ranks} and {other.ranks}"
            )
        n, chunks = self.ranks, self.chunks + other.chunks
        own = self.embed(range(n), range(self.chunks), into=(n, chunks))
        # Its scratch comes behind ours, as if that were chunks, too.
        others = other.embed(range(n), range(self.chunks, chunks), into=(n, chunks + self.scratch))
        return Schedule.together([own, replace(others, chunks=chunks)])

    @staticmethod
    def together(parts: Sequence[Schedule]) -> Schedule:
        """Run all `parts` at once, on the same ranks and chunks: round r is every part's round r.

        The parts must touch different slots, as the rings inside different nodes do.
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
        """Rename ranks and chunks: rank r becomes `ranks[r]`, chunk c becomes `chunks[c]`.

        `into` is the (ranks, chunks) of the resulting schedule, by default those of this one. A
        reversed ring is `ring.embed(range(n)[::-1], range(n)[::-1])`; a ring on the last four of
        eight ranks is `ring.embed([4, 5, 6, 7], range(4), into=(8, 4))`. Scratch stays scratch.
        If `chunks[c]` is a sequence, chunk c is split into those chunks, and so is each transfer.
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
        names = [[piece[cut] for piece in pieces] for cut in range(cuts)]
        rounds = [
            tuple(
                Transfer(ranks[t.src], ranks[t.dst], cut[t.read], cut[t.write], t.reduce)
                for cut in names
                for t in transfers
            )
            for transfers in self.rounds
        ]
        return Schedule(n, c, tuple(rounds))

    def transpose(self) -> Schedule:
        """Reverse the rounds, swap source and destination, and swap reduce and copy.

        If each transfer is a matrix, this is the transpose of their product. It turns a
        reduce-scatter into an all-gather and a broadcast into a reduce. It is exact only if a slot
        is dead once it has been the source of a reduce, so verify the result.
        """
        rounds = [
            tuple(Transfer(t.dst, t.src, t.write, t.read, not t.reduce) for t in r)
            for r in reversed(self.rounds)
        ]
        return Schedule(self.ranks, self.chunks, tuple(rounds))


def short(value: object) -> str:
    """Return repr(value) on one line, cut to 60 characters."""
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


def _check_names(what: str, names: Sequence[int], count: int | None, bound: int) -> None:
    wanted = len(names) if count is None else count
    if not (len(names) == len(set(names)) == wanted and all(0 <= x < bound for x in names)):
        raise ScheduleError(
            f"embed() needs {wanted} distinct {what} in 0..{bound - 1}, got {list(names)}"
        )
