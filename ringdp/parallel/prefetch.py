"""Which units to gather ahead of their use. Pure: `gathering` asks here, for the formulas, too.

The order of the last iteration is the forecast for this one. Gathered but not yet used units may
hold `limit` bytes at most; a unit that does not fit ends the look-ahead, and so does the unit in
use, which will be freed before its next use.

Note [gathers yield to reductions]
    While a unit's gradients are put into its bucket, the bucket before may still be on its way to
    the other ranks. In the host's memory it counts as one of the units gathered ahead: the next
    gather starts when that reduction is through, which the engine looks for whenever a gradient
    comes, and no later than when the unit's own reduction starts. So the two buckets and the two
    gathered units that there could be are never more than three together. What is gathered when is
    then a matter of time, but not what is gathered after what: a gather that yields comes before
    all that the engine does next.
    Over a network they go side by side, and there is one bucket more: taking turns there hid 69 to
    78 % of an emulated link instead of 80 to 84 (`hidden_share` of bench/zero_step.py, three runs
    each). So they do on a GPU, whose work is put in its streams long before it runs, when no one
    can look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    is_sharded: Callable[[int], bool],
    in_flight: int,
    sizes: Sequence[int],
    limit: int,
) -> list[int]:
    """The units to gather now. `sizes` are bytes that gathering a unit takes."""
    found: list[int] = []
    for unit in order[position + 1 :]:
        if unit == in_use:
            break
        if unit in found or not is_sharded(unit):
            continue
        in_flight += sizes[unit]
        if in_flight > limit:
            break
        found.append(unit)
    return found
