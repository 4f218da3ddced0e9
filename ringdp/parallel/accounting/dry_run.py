"""Simulates one iteration of an engine without tensors, for the memory, traffic and time formulas.

The engine's own `Gathering` decides what is gathered and freed when, over units that only record
it. The iteration follows `forecast`: one forward and one backward, every unit called once, none
inside another. The root's forward comes after those of all others, its backward before them; of
several units of one module the last one's gradients are complete first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from ringdp.parallel.gathering import Gathering
from ringdp.parallel.prefetch import Groups
from ringdp.parallel.reducing import Reducing
from ringdp.parallel.state import State
from ringdp.parallel.unit import FlatUnit


class Event(NamedTuple):
    """What happens to a unit, or which group runs.

    Of a unit with pieces: keep (this rank's piece is allocated), gather_near (from the pieces). For
    a bucket that is allocated and freed: fill (allocated), reduced (freed).
    """

    what: Literal[
        "gather", "gather_near", "use", "free", "keep", "forward", "backward", "fill", "reduced",
    ]  # fmt: skip
    which: int


def iteration(
    sizes: Sequence[int],
    groups: Groups,
    limit: int,
    *,
    freed: bool,
    kept: Collection[int] = (),
    pieces: Sequence[int] = (),
    buckets: Sequence[int] = (),
    overlap: bool = True,
    yields: bool = False,
) -> list[Event]:
    """`sizes`: bytes that gathering each unit takes. `freed`: whether units but the root are freed
    after each use, unless they would be gathered again at once. `kept`: those of them that are not
    freed after their forward. `pieces`: bytes that a rank keeps of each unit, from which it is
    gathered for its backward; 0 without a `reshard_size`. `buckets`: bytes of each unit's bucket,
    if these are allocated and freed. `overlap`: whether a reduction runs during the next unit's
    backward. `yields`: see Note [gathers yield to reductions]. The root's reduction, at the end,
    takes no more memory and is left out.
    """
    events: list[Event] = []
    pieces = pieces or [0] * len(sizes)
    units = [_Unit(i, size, events, freed=freed, piece=pieces[i]) for i, size in enumerate(sizes)]
    reducing = _Reducing(buckets or [0] * len(sizes), events, overlap=overlap)
    nowhere: Any = None
    gathering = Gathering(units, groups, nowhere, limit, reducing if yields else None, kept)
    inner = range(1, len(groups))
    ended: list[int] = []  # units to free: their backward is over

    def use(group: int, *, fill: bool = False) -> None:
        for unit in groups[group]:
            gathering.prefetch_deferred(wait=True)
            free()
            gathering.use(unit)
            events.append(Event("use", unit))
            if fill and reducing.buckets[unit]:
                events.append(Event("fill", unit))

    def free() -> None:
        while ended:
            gathering.done_with(ended.pop(0), free=True)

    gathering.begin(foreseen=True, trains=True)
    use(0)
    for group in inner:
        use(group)
        events.append(Event("forward", group))
        for unit in groups[group]:
            gathering.done_with(unit, free=unit not in gathering.kept, again=True)
    events.append(Event("forward", 0))
    use(0, fill=True)
    events.append(Event("backward", 0))
    for group in reversed(inner):
        use(group, fill=True)
        events.append(Event("backward", group))
        for unit in reversed(groups[group]):
            if reducing.buckets[unit]:
                gathering.prefetch_deferred(wait=True)
                reducing.reduce(unit)
        ended += groups[group]
    free()
    return events


class Peaks(NamedTuple):
    """Peak bytes of gathered units, and of gathered units and buckets together."""

    gathered: int
    passing: int


def peaks(
    events: Sequence[Event],
    sizes: Sequence[int],
    buckets: Sequence[int],
    pieces: Sequence[int] = (),
) -> Peaks:
    """For equal units of S bytes, equal buckets, a limit of S and a trained root of R bytes:
    R + 2 S, and 2 R + 3 S. `pieces`: bytes of each unit's piece, which all stay until the end."""
    gathered = filled = 0
    most = Peaks(0, 0)
    for what, unit in events:
        if what in ("gather", "gather_near", "free"):
            gathered += -sizes[unit] if what == "free" else sizes[unit]
        elif what == "keep":
            gathered += pieces[unit]
        elif what in ("fill", "reduced"):
            filled += buckets[unit] if what == "fill" else -buckets[unit]
        most = Peaks(max(most.gathered, gathered), max(most.passing, gathered + filled))
    return most


class _Piece:
    """Records when a piece of the unit is `kept`, if it has any."""

    def __init__(self, index: int, events: list[Event], *, exists: bool) -> None:
        self.index, self._events, self._exists, self.kept = index, events, exists, False

    def keep(self) -> None:
        if self._exists:  # the iteration asks once
            self._events.append(Event("keep", self.index))
            self.kept = True

    def forget(self) -> None:
        self.kept = False


class _Unit(FlatUnit):
    """A unit without tensors that records what happens to it."""

    def __init__(
        self, index: int, size: int, events: list[Event], *, freed: bool, piece: int = 0
    ) -> None:
        self.index, self.bytes, self.freed, self._events = index, size, freed, events
        self.state = State.SHARDED
        self.piece: Any = _Piece(index, events, exists=piece > 0)

    def gather(self, comm: object) -> None:
        self._events.append(Event("gather_near" if self.piece.kept else "gather", self.index))
        self.state = State.GATHERING

    def unshard(self) -> None:
        self.state = State.UNSHARDED

    def set_aside(self) -> None:
        self.state = State.GATHERING

    def is_stale(self) -> bool:
        return False

    def lost(self) -> list[str]:
        return []

    def reshard(self, *, again: bool = False) -> None:
        if again:
            self.piece.keep()
        self._events.append(Event("free", self.index))
        self.state = State.SHARDED


class _Reducing(Reducing):
    """Records when each bucket is reduced."""

    def __init__(self, buckets: Sequence[int], events: list[Event], *, overlap: bool) -> None:
        self.buckets, self.overlap, self._events = buckets, overlap, events
        self._unit: int | None = None  # whose bucket is being reduced

    def reduce(self, unit: int) -> None:
        self.finish()
        self._unit = unit
        if not self.overlap:
            self.finish()

    def finish(self) -> None:
        if self._unit is not None:
            self._events.append(Event("reduced", self._unit))
            self._unit = None

    def under_way(self) -> int:
        return self.buckets[self._unit] if self._unit is not None else 0
