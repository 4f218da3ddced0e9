"""From a collective and its algorithm to what a transport runs: one rank's program.

A schedule is proved, projected and fused once per (collective, algorithm, n, root): for a function
as long as it lives, which may hold the communicator that it is for; else as long as it is among
the last ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from types import FunctionType
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ringdp.errors import ScheduleError
from ringdp.schedule import (
    Builder,
    Collective,
    Program,
    Row,
    contract,
    fifo_depth,
    fuse,
    project,
    proved,
)
from ringdp.schedule.custom import name_of
from ringdp.schedule.liveness import fits

MOST = 1024  # that are remembered


class Asked(NamedTuple):
    """A program for one rank. Without a `depth`: see `Transport.depth`."""

    collective: Collective
    n: int
    rank: int
    root: int
    depth: float | None


@dataclass(frozen=True)
class Origin:
    """What a program is made of."""

    collective: Collective
    algorithm: str  # its name
    root: int
    rows: Iterable[Iterable[int]]
    builder: Callable[[], str | Builder | None]  # gives it; None for a function that is no more

    @cached_property
    def names(self) -> dict[tuple[int, ...], str]:
        """Of rows, by round, peers and chunks."""
        rows = [Row(*map(int, row)) for row in self.rows]
        return {row[:5]: row.name for row in rows}


# By the address of a program's rows, as long as it lives: they outlive it here, so that no others
# get the address before.
_origins: dict[int, Origin] = {}


_own: WeakKeyDictionary[FunctionType, dict[Asked, Program]] = WeakKeyDictionary()


def program(
    collective: Collective,
    algorithm: str | Builder,
    n: int,
    rank: int,
    root: int,
    depth: float | None,
) -> Program:
    """Proved, projected, fused if that fits, and shown not to stall in FIFOs of `depth` slots.

    Without a `depth` projected only: who runs whole rounds cannot stall. Nor can who waits to
    receive only, as fusing lets sends come earlier, and receives later, than in the order in which
    each receive comes after its send: where `depth` is infinite no other rank's program is made.
    """
    asked = Asked(collective, n, rank, root, depth)
    if not isinstance(algorithm, FunctionType):  # a bound method is another object each time
        return _of_last(algorithm, asked)
    known = _own.setdefault(algorithm, {})
    if asked not in known:
        known[asked] = _made(algorithm, asked)
    return known[asked]


def _made(algorithm: str | Builder, asked: Asked) -> Program:
    collective, n, rank, root, depth = asked
    plan = proved(algorithm, collective, n, root)
    if depth is None:
        return project(plan, rank)
    live = contract(collective, n, plan.chunks, root).after

    def fused(plain: Program) -> Program:
        return fuse(plain, [c for q, c in live if q == plain.rank])

    if depth == inf:
        return fused(project(plan, rank))
    plain = [project(plan, r) for r in range(n)]
    # Fusing trades longer FIFOs for fewer passes; what then needs too many slots runs as it is.
    for programs in ([*map(fused, plain)], plain):
        if fits(programs, int(depth)):
            _remember(algorithm, asked, programs[rank])
            return programs[rank]
    raise ScheduleError(
        f"{algorithm} {collective} needs FIFOs of {fifo_depth(plain)} slots; the transport has "
        f"{depth}"
    )


_of_last = lru_cache(maxsize=MOST)(_made)


def _remember(algorithm: str | Builder, asked: Asked, made: Program) -> None:
    own = isinstance(algorithm, FunctionType)
    builder = weakref.ref(algorithm) if own else lambda: algorithm
    origin = Origin(asked.collective, name_of(algorithm), asked.root, made.rows, builder)
    address = made.rows.ctypes.data
    _origins[address] = origin
    weakref.finalize(made, _origins.pop, address).atexit = False


def origin_of(rows: int) -> Origin | None:
    """Of the program whose rows lie at this address."""
    return _origins.get(rows)
