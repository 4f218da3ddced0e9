"""Which units to gather ahead of their use. Pure: the engine and the memory formula both ask here.

The order of the last iteration is the forecast for this one. Gathered but not yet used units may
hold `limit` bytes at most; a unit that does not fit ends the look-ahead, and so does the unit in
use, which will be freed before its next use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Literal, NamedTuple

Groups = Sequence[Sequence[int]]  # units of one module, used together; those of the root first
Order = tuple[int, ...]  # units in the order of their uses, a forward and its backward


def forecast(groups: Groups) -> Order:
    """Before the first iteration: as registered, then backwards."""
    root, *inner = groups
    order = (root, *inner, root, *reversed(inner))
    return tuple(unit for group in order for unit in group)


def one_unit(sizes: Sequence[int], groups: Groups) -> int:
    """The limit where none is given: the largest unit but the root, in bytes."""
    return max((sizes[unit] for group in groups[1:] for unit in group), default=0)


def position_of(unit: int, order: Order, after: int) -> int | None:
    """Where in `order` this use is, looking on from `after`; None if it was not foreseen."""
    return next((i for i in range(after + 1, len(order)) if order[i] == unit), None)


def ahead(
    order: Order,
    position: int,
    *,
    in_use: int | None,
    sharded: Container[int],
    in_flight: int,
    sizes: Sequence[int],
    limit: int,
) -> list[int]:
    """The units to gather now. `sizes` are bytes that gathering a unit takes."""
    found: list[int] = []
    for unit in order[position + 1 :]:
        if unit == in_use:
            break
        if unit not in sharded or unit in found:
            continue
        in_flight += sizes[unit]
        if in_flight > limit:
            break
        found.append(unit)
    return found


class Event(NamedTuple):
    """Of an iteration: what happens to a unit, or which group runs."""

    what: Literal["gather", "use", "free", "forward", "backward"]
    which: int


def iteration(sizes: Sequence[int], groups: Groups, limit: int, *, freed: bool) -> Iterator[Event]:
    """What the engine does in one iteration in the order of `forecast`.

    `freed`: whether units go after each use, all but the root; what would be gathered again at once
    stays. The root's forward is taken to run after those of all others, its backward before theirs.
    """
    order = forecast(groups)
    held: set[int] = set()
    waiting: set[int] = set()  # gathered, not yet used
    position = -1

    def wanted(in_use: int | None) -> list[int]:
        return ahead(
            order,
            position,
            in_use=in_use,
            sharded=set(range(len(sizes))) - held,
            in_flight=sum(sizes[u] for u in waiting),
            sizes=sizes,
            limit=limit,
        )

    def prefetch(in_use: int | None) -> Iterator[Event]:
        for unit in wanted(in_use):
            held.add(unit)
            waiting.add(unit)
            yield Event("gather", unit)

    def use(group: int) -> Iterator[Event]:
        nonlocal position
        for unit in groups[group]:
            position += 1
            if unit not in held:
                held.add(unit)
                yield Event("gather", unit)
            waiting.discard(unit)
            yield from prefetch(unit if group else None)
            yield Event("use", unit)

    def free(group: int) -> Iterator[Event]:
        for unit in groups[group] if freed else ():
            held.discard(unit)
            if unit in wanted(None):
                held.add(unit)
                waiting.add(unit)
            else:
                yield Event("free", unit)
            yield from prefetch(None)

    inner = range(1, len(groups))
    yield from use(0)
    for group in inner:
        yield from use(group)
        yield Event("forward", group)
        yield from free(group)
    yield Event("forward", 0)
    yield from use(0)
    yield Event("backward", 0)
    for group in reversed(inner):
        yield from use(group)
        yield Event("backward", group)
        yield from free(group)


def gathered_peak(sizes: Sequence[int], groups: Groups, limit: int) -> int:
    """Peak bytes of gathered units over one iteration.

    The root stays from its forward to the end of its backward; all others go after each use. With
    equal units of S bytes and limit S this is root + 2 S.
    """
    held = peak = 0
    for what, unit in iteration(sizes, groups, limit, freed=True):
        if what in ("gather", "free"):
            held += sizes[unit] if what == "gather" else -sizes[unit]
            peak = max(peak, held)
    return peak


def gathers(sizes: Sequence[int], groups: Groups, limit: int) -> Counter[int]:
    """How often each unit is gathered in one iteration, where units are freed.

    The root once, the last unit once if the limit lets it stay for its backward, others twice.
    """
    events = iteration(sizes, groups, limit, freed=True)
    return Counter(unit for what, unit in events if what == "gather")
