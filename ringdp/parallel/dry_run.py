"""One iteration of an engine without its tensors, for the formulas of memory and of traffic, and
for whoever predicts times.

What is gathered and freed when, the engine's own `Gathering` decides, over units that only tell of
it. It follows `forecast`: one forward, one backward, every unit called once, none inside another.
The root's forward is taken to run after those of all others, its backward before theirs; of several
units in a module the last one's gradients are taken to be complete first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ringdp.parallel.gathering import Gathering
from ringdp.parallel.prefetch import Groups
from ringdp.parallel.reducing import Reducing
from ringdp.parallel.unit import FlatUnit, State


class Event(NamedTuple):
    """What happens to a unit, or which group runs.

    Of a unit's bucket, where it has one that comes and goes: fill, when it is made; reduce, when
    its gradients are complete; reduced, when it goes.
    """

    what: Literal["gather", "use", "free", "forward", "backward", "fill", "reduce", "reduced"]
    which: int


def iteration(
    sizes: Sequence[int],
    groups: Groups,
    limit: int,
    *,
    freed: bool,
    buckets: Sequence[int] = (),
    overlap: bool = True,
    yields: bool = False,
) -> list[Event]:
    """`sizes`: bytes that gathering a unit takes. `freed`: whether units go after each use, all but
    the root; what would be gathered again at once stays. `buckets`: bytes of each unit's, where
    they come and go. `overlap`: whether a reduction goes on during the next unit's backward.
    `yields`: see Note [gathers yield to reductions].
    """
    events: list[Event] = []
    units = [_Unit(i, size, events, freed=freed) for i, size in enumerate(sizes)]
    reducing = _Reducing(buckets or [0] * len(sizes), events, overlap=overlap)
    nowhere: Any = None
    gathering = Gathering(units, groups, nowhere, limit, reducing if yields else None)
    inner = range(1, len(groups))

    def use(group: int, *, fill: bool = False) -> None:
        for unit in groups[group]:
            gathering.use(unit)
            events.append(Event("use", unit))
            if fill and reducing.buckets[unit]:
                events.append(Event("fill", unit))

    def reduce(group: int) -> None:
        for unit in reversed(groups[group]):
            if reducing.buckets[unit]:
                gathering.prefetch_deferred(wait=True)
                reducing.reduce(unit)

    def free(group: int) -> None:
        for unit in groups[group]:
            gathering.done_with(unit, free=True)

    use(0)
    for group in inner:
        use(group)
        events.append(Event("forward", group))
        free(group)
    events.append(Event("forward", 0))
    use(0, fill=True)
    events.append(Event("backward", 0))
    for group in reversed(inner):
        use(group, fill=True)
        events.append(Event("backward", group))
        reduce(group)
        gathering.prefetch_deferred(wait=True)
        free(group)
    reduce(0)
    reducing.finish()
    return events


class Peaks(NamedTuple):
    """Bytes at the worst moment: of gathered units, and of these and all buckets together."""

    gathered: int
    passing: int


def peaks(events: Sequence[Event], sizes: Sequence[int], buckets: Sequence[int]) -> Peaks:
    """With equal units of S bytes, buckets alike, a limit of S and a root of R bytes that is
    trained: R + 2 S, and 2 R + 3 S."""
    gathered = filled = 0
    most = Peaks(0, 0)
    for what, unit in events:
        if what in ("gather", "free"):
            gathered += sizes[unit] if what == "gather" else -sizes[unit]
        elif what in ("fill", "reduced"):
            filled += buckets[unit] if what == "fill" else -buckets[unit]
        most = Peaks(max(most.gathered, gathered), max(most.passing, gathered + filled))
    return most


def gathers(sizes: Sequence[int], groups: Groups, limit: int) -> Counter[int]:
    """How often each unit is gathered in one iteration, where units are freed.

    The root once, the last unit once if the limit lets it stay for its backward, others twice.
    """
    events = iteration(sizes, groups, limit, freed=True)
    return Counter(unit for what, unit in events if what == "gather")


class _Unit(FlatUnit):
    """One without tensors: it tells what happens to it."""

    def __init__(self, index: int, size: int, events: list[Event], *, freed: bool) -> None:
        self.index, self.bytes, self.freed, self._events = index, size, freed, events
        self.state = State.SHARDED

    def gather(self, comm: object) -> None:
        self._events.append(Event("gather", self.index))
        self.state = State.GATHERING

    def unshard(self) -> None:
        self.state = State.UNSHARDED

    def set_aside(self) -> None:
        self.state = State.GATHERING

    def lost(self) -> list[str]:
        return []

    def reshard(self) -> None:
        self._events.append(Event("free", self.index))
        self.state = State.SHARDED


class _Reducing(Reducing):
    """One that has buckets only: it tells which is reduced when."""

    def __init__(self, buckets: Sequence[int], events: list[Event], *, overlap: bool) -> None:
        self.buckets, self.overlap, self._events = buckets, overlap, events
        self._unit: int | None = None  # whose bucket is being reduced

    def reduce(self, unit: int) -> None:
        self.finish()
        self._events.append(Event("reduce", unit))
        self._unit = unit
        if not self.overlap:
            self.finish()

    def finish(self) -> None:
        if self._unit is not None:
            self._events.append(Event("reduced", self._unit))
            self._unit = None

    def under_way(self) -> int:
        return self.buckets[self._unit] if self._unit is not None else 0
