"""Which units to gather ahead of their use. Pure: the engine and the memory formula both ask here.

The order of the last iteration is the forecast for this one. Gathered but not yet used units may
hold `limit` bytes at most; a unit that does not fit ends the look-ahead, and so does the unit in
use, which will be freed before its next use.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

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


def gathered_peak(sizes: Sequence[int], groups: Groups, limit: int) -> int:
    """Peak bytes of gathered units over one iteration in the order of `forecast`.

    The root stays from its forward to the end of its backward; all others go after each use. With
    equal units of S bytes and limit S this is root + 2 S.
    """
    order = forecast(groups)
    held: set[int] = set()
    waiting: set[int] = set()  # gathered, not yet used
    peak = 0

    def gather(position: int, in_use: int | None) -> None:
        nonlocal peak
        more = ahead(
            order,
            position,
            in_use=in_use,
            sharded=set(range(len(sizes))) - held,
            in_flight=sum(sizes[u] for u in waiting),
            sizes=sizes,
            limit=limit,
        )
        held.update(more)
        waiting.update(more)
        peak = max(peak, sum(sizes[u] for u in held))

    root, *inner = groups
    position = -1
    for group in (root, *inner, root, *reversed(inner)):
        for unit in group:
            position += 1
            held.add(unit)
            waiting.discard(unit)
            gather(position, unit)
        if group is not root:
            for unit in group:
                held.discard(unit)
                gather(position, None)
    return peak
