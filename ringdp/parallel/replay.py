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
    replay = _Replay(sizes, groups, limit, freed, buckets or [0] * len(sizes), overlap, yields)
    replay.forward()
    replay.backward()
    return replay.events


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


class _Replay:
    """What an engine has its gathering and reducing do; of the latter there are buckets only."""

    def __init__(
        self,
        sizes: Sequence[int],
        groups: Groups,
        limit: int,
        freed: bool,
        buckets: Sequence[int],
        overlap: bool,
        yields: bool,
    ) -> None:
        self.groups, self.buckets, self.overlap = groups, buckets, overlap
        self.events: list[Event] = []
        units = [_Unit(i, size, self.events, freed=freed) for i, size in enumerate(sizes)]
        nowhere: Any = None
        reducing: Any = self if yields else None
        self.gathering = Gathering(units, groups, nowhere, limit, reducing)
        self.reducing: int | None = None  # whose bucket is being reduced

    def forward(self) -> None:
        inner = range(1, len(self.groups))
        self.use(0)
        for group in inner:
            self.use(group)
            self.events.append(Event("forward", group))
            self.free(group)
        self.events.append(Event("forward", 0))

    def backward(self) -> None:
        inner = range(1, len(self.groups))
        self.use(0, fill=True)
        self.events.append(Event("backward", 0))
        for group in reversed(inner):
            self.use(group, fill=True)
            self.events.append(Event("backward", group))
            for unit in reversed(self.groups[group]):
                self.reduce(unit)
            self.gathering.prefetch_deferred(wait=True)
            self.free(group)
        for unit in reversed(self.groups[0]):
            self.reduce(unit)
        self.finish()

    def use(self, group: int, *, fill: bool = False) -> None:
        for unit in self.groups[group]:
            self.gathering.use(unit)
            self.events.append(Event("use", unit))
            if fill and self.buckets[unit]:
                self.events.append(Event("fill", unit))

    def free(self, group: int) -> None:
        for unit in self.groups[group]:
            self.gathering.done_with(unit, free=True)

    def reduce(self, unit: int) -> None:
        if self.buckets[unit]:
            self.gathering.prefetch_deferred(wait=True)
            self.finish()
            self.events.append(Event("reduce", unit))
            self.reducing = unit
            if not self.overlap:
                self.finish()

    def finish(self) -> None:
        if self.reducing is not None:
            self.events.append(Event("reduced", self.reducing))
            self.reducing = None

    def under_way(self) -> int:
        return self.buckets[self.reducing] if self.reducing is not None else 0
