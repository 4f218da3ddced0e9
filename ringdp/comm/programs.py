"""Builds and caches the program that a rank runs for a collective and algorithm.

A schedule is proved, projected and fused once per (collective, algorithm, n, root). Programs of a
function are cached weakly, as long as the function lives: it may refer to its communicator. All
others are in an LRU cache.
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

MOST = 1024  # cached programs


class ProgramKey(NamedTuple):
    """The cache key of a program, without its algorithm. For `depth` see `Transport.depth`."""

    collective: Collective
    n: int
    rank: int
    root: int
    depth: float | None


@dataclass(frozen=True)
class Origin:
    """What a program was built from."""

    collective: Collective
    algorithm: str  # its name
    root: int
    rows: Iterable[Iterable[int]]
    builder: Callable[[], str | Builder | None]  # returns the algorithm; None once it is collected

    @cached_property
    def names(self) -> dict[tuple[int, ...], str]:
        """Maps (round, recv_peer, send_peer, src_chunk, dst_chunk) to the row's name."""
        rows = [Row(*map(int, row)) for row in self.rows]
        return {row[:5]: row.name for row in rows}


# By the address of a program's rows, as long as the program lives. An Origin holds the rows, so no
# other program can get their address while the entry exists.
_origins: dict[int, Origin] = {}


_of_function: WeakKeyDictionary[FunctionType, dict[ProgramKey, Program]] = WeakKeyDictionary()


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
    key = ProgramKey(collective, n, rank, root, depth)
    if not isinstance(algorithm, FunctionType):  # a bound method is a new object each time
        return _cached(algorithm, key)
    known = _of_function.setdefault(algorithm, {})
    if key not in known:
        known[key] = _build(algorithm, key)
    return known[key]


def _build(algorithm: str | Builder, key: ProgramKey) -> Program:
    collective, n, rank, root, depth = key
    plan = proved(algorithm, collective, n, root)
    if depth is None:
        return project(plan, rank)
    live = contract(collective, n, plan.chunks, root).after

    def fused(plain: Program) -> Program:
        return fuse(plain, [c for q, c in live if q == plain.rank])

    if depth == inf:
        return fused(project(plan, rank))
    plain = [project(plan, r) for r in range(n)]
    # Fused programs make fewer passes but need longer FIFOs. If these are too long, do not fuse.
    for programs in ([*map(fused, plain)], plain):
        if fits(programs, int(depth)):
            _record_origin(algorithm, key, programs[rank])
            return programs[rank]
    raise ScheduleError(
        f"{algorithm} {collective} needs FIFOs of {fifo_depth(plain)} slots; the transport has "
        f"{depth}"
    )


_cached = lru_cache(maxsize=MOST)(_build)


def _record_origin(algorithm: str | Builder, key: ProgramKey, built: Program) -> None:
    is_function = isinstance(algorithm, FunctionType)
    builder = weakref.ref(algorithm) if is_function else lambda: algorithm
    origin = Origin(key.collective, name_of(algorithm), key.root, built.rows, builder)
    address = built.rows.ctypes.data
    _origins[address] = origin
    weakref.finalize(built, _origins.pop, address).atexit = False


def origin_of(rows: int) -> Origin | None:
    """Return the origin of the program whose rows are at this address, or None."""
    return _origins.get(rows)
