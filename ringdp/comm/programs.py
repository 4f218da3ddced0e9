"""Builds and caches the program that a rank runs for a collective and algorithm.

A schedule is proved, projected and fused once per (collective, algorithm, n, root). Programs of a
function are cached weakly, as long as the function lives: it may refer to its communicator. All
others are in an LRU cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from types import FunctionType
from weakref import WeakKeyDictionary

from ringdp.errors import ScheduleError
from ringdp.schedule import (
    Builder,
    Collective,
    Program,
    Row,
    Schedule,
    contract,
    fifo_depth,
    fuse,
    project,
    proved,
)
from ringdp.schedule.custom import name_of
from ringdp.schedule.liveness import fits

MOST = 1024  # cached programs


@dataclass(frozen=True)
class Origin:
    """What a program was built from."""

    collective: Collective
    algorithm: str  # its name
    custom: bool  # whether the user gave its schedule, or a parameter of it
    root: int
    schedule: Schedule
    rows: Iterable[Iterable[int]]

    @cached_property
    def names(self) -> dict[tuple[int, ...], str]:
        """Maps (round, recv_peer, send_peer, src_chunk, dst_chunk) to the row's name."""
        rows = [Row(*map(int, row)) for row in self.rows]
        return {row[:5]: row.name for row in rows}


# By the address of a program's rows, as long as the program lives. An Origin holds the rows, so no
# other program can get their address while the entry exists.
_origins: dict[int, Origin] = {}
Key = tuple[Collective, int, int, int, float | None]  # collective, n, rank, root, depth
_of_function: WeakKeyDictionary[FunctionType, dict[Key, Program]] = WeakKeyDictionary()


def program(
    collective: Collective,
    algorithm: str | Builder,
    n: int,
    rank: int,
    root: int,
    depth: float | None,
) -> Program:
    """Return the rank's program, proved, and fused if it then cannot stall with `depth` FIFO slots.

    If `depth` is None, the program is only projected: a transport that runs whole rounds cannot
    stall. If it is infinite, sends never wait. Then fusing cannot cause a stall, since it only
    moves sends earlier and receives later, and the programs of the other ranks are not built.
    """
    key: Key = collective, n, rank, root, depth
    if not isinstance(algorithm, FunctionType):  # a bound method is a new object each time
        return _cached(algorithm, key)
    known = _of_function.setdefault(algorithm, {})
    if key not in known:
        known[key] = _build(algorithm, key)
    return known[key]


def _build(algorithm: str | Builder, key: Key) -> Program:
    collective, n, rank, root, depth = key
    plan = proved(algorithm, collective, n, root)
    built = _runnable(plan, collective, rank, root, depth)
    if built is None:
        needed = fifo_depth([project(plan, r) for r in range(n)])
        raise ScheduleError(
            f"{algorithm} {collective} needs FIFOs of {needed} slots; the transport has {depth}"
        )
    address, custom = built.rows.ctypes.data, not isinstance(algorithm, str) or ":" in algorithm
    _origins[address] = Origin(collective, name_of(algorithm), custom, root, plan, built.rows)
    weakref.finalize(built, _origins.pop, address).atexit = False
    return built


_cached = lru_cache(maxsize=MOST)(_build)


def _runnable(
    plan: Schedule, collective: Collective, rank: int, root: int, depth: float | None
) -> Program | None:
    """Return the program of `rank`, or None if it needs longer FIFOs than `depth`."""
    if depth is None:
        return project(plan, rank)
    promise = contract(collective, plan.ranks, plan.chunks, root)

    def fused(plain: Program) -> Program:
        return fuse(plain, promise.kept(plain.rank))

    if depth == inf:
        return fused(project(plan, rank))
    plain = [project(plan, r) for r in range(plan.ranks)]
    # Fused programs make fewer passes but need longer FIFOs. If these are too long, do not fuse.
    for programs in ([*map(fused, plain)], plain):
        if fits(programs, int(depth)):
            return programs[rank]
    return None


def origin_of(rows: int) -> Origin | None:
    """Return the origin of the program whose rows are at this address, or None."""
    return _origins.get(rows)
