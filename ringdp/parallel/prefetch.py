"""Which units to gather ahead of their use. Pure: `gathering` uses it, and so do the formulas.

The order of uses in the last iteration predicts this one. Units gathered but not yet used may hold
at most `limit` bytes. The look-ahead ends at a unit that does not fit, and at the unit in use,
which will be freed before its next use.

Note [gathers yield to reductions]
    While a unit's gradients fill its bucket, the previous bucket may still be in its reduction. In
    shared memory that bucket counts as a unit gathered ahead: the next gather waits for the
    reduction, which the engine checks at every gradient, and at the latest before the unit's own
    reduction starts. So of two buckets and two gathered units at most three exist at once. When a
    gather starts then depends on timing, but the order of gathers does not: a deferred gather comes
    before everything that the engine does next.
    Over a network both run side by side, and one more bucket exists: taking turns hid 69 to 78 % of
    an emulated link instead of 80 to 84 (`hidden_share` of bench/zero_step.py, three runs each).
    On a GPU they also run side by side, since its work is enqueued long before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Groups = Sequence[Sequence[int]]  # units of one module, used together; those of the root first
Order = tuple[int, ...]  # units in the order of their uses, a forward and its backward


def forecast(groups: Groups) -> Order:
    """The prediction for the first iteration: in order of registration, then in reverse."""
    root, *inner = groups
    order = (root, *inner, root, *reversed(inner))
    return tuple(unit for group in order for unit in group)


def one_unit(sizes: Sequence[int], groups: Groups) -> int:
    """The default limit: the bytes of the largest unit but the root."""
    return max((sizes[unit] for group in groups[1:] for unit in group), default=0)


def position_of(unit: int, order: Order, after: int) -> int | None:
    """The position in `order` of this use, searched behind `after`; None if not predicted."""
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
    """The units to gather now. `sizes`: bytes that gathering each unit takes."""
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
