"""The algorithms: short pure functions n -> Schedule.

Chunk c is owned by rank c. Bytes are per rank, in units of the whole buffer S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple, get_args

from ringdp.errors import UsageError
from ringdp.schedule.ir import Round, Schedule, Transfer

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


def ring_reduce_scatter(n: int) -> Schedule:
    """Chunk c starts at rank c + 1 and gathers every rank's part on its way round the ring to c.

    n - 1 rounds, (n-1)/n S sent (Patarasuk & Yuan 2009). The fold starts at another rank for each
    chunk, so its rounding depends on where the chunk boundaries lie.
    """
    return Schedule(
        n,
        n,
        tuple(
            tuple(
                Transfer(i, (i + 1) % n, (i - r - 1) % n, (i - r - 1) % n, reduce=True)
                for i in range(n)
            )
            for r in range(n - 1)
        ),
    )


def ring_all_gather(n: int) -> Schedule:
    """Every rank's chunk goes once round the ring. n - 1 rounds, (n-1)/n S sent."""
    return ring_reduce_scatter(n).transpose()


def ring_all_reduce(n: int) -> Schedule:
    """Reduce-scatter, then all-gather. 2(n-1) rounds, 2(n-1)/n S sent, the least possible."""
    return ring_reduce_scatter(n).then(ring_all_gather(n))


def direct_reduce_scatter(n: int) -> Schedule:
    """Everyone sends chunk c to rank c, which then folds the parts in rank order.

    One round that sends, (n-1)/n S, and n scratch chunks. Rank order makes the rounding of an
    element independent of chunk boundaries: this is what gives the same bits for every bucket size.
    Addition commutes, so rank 1 may start the fold from its own part, as rank 0 does; the others
    start it in the scratch chunk of rank 0's part and copy the result home.
    """

    def part(owner: int, rank: int) -> int:
        return owner if owner == rank else n + rank

    exchange = tuple(
        Transfer(src, (src + shift) % n, (src + shift) % n, n + src, reduce=False)
        for shift in range(1, n)
        for src in range(n)
    )
    first = [owner if owner < 2 else 0 for owner in range(n)]
    fold = tuple(
        Transfer(owner, owner, part(owner, rank), part(owner, first[owner]), reduce=True)
        for owner in range(n)
        for rank in range(n)
        if rank != first[owner]
    )
    settle = tuple(Transfer(owner, owner, n, owner, reduce=False) for owner in range(2, n))
    return Schedule(n, n, _nonempty(exchange, fold, settle))


def direct_all_gather(n: int) -> Schedule:
    """Everyone sends its chunk to everyone. One round, (n-1)/n S sent."""
    return Schedule(
        n,
        n,
        _nonempty(
            tuple(
                Transfer(src, (src + shift) % n, src, src, reduce=False)
                for shift in range(1, n)
                for src in range(n)
            )
        ),
    )


def direct_all_reduce(n: int) -> Schedule:
    """Direct reduce-scatter, then direct all-gather: two rounds that send, 2(n-1)/n S."""
    return direct_reduce_scatter(n).then(direct_all_gather(n))


def ring_broadcast(n: int) -> Schedule:
    """Rank 0's n chunks go down the line 0, 1, ..., n-1, one behind the other.

    2n - 2 rounds; each rank but the last sends S, and a chunk's worth is in flight on every link.
    """
    return Schedule(
        n,
        n,
        tuple(
            tuple(
                Transfer(i, i + 1, r - i, r - i, reduce=False)
                for i in range(n - 1)
                if 0 <= r - i < n
            )
            for r in range(2 * n - 2)
        ),
    )


def direct_broadcast(n: int) -> Schedule:
    """Rank 0 sends chunk c to rank c, then everyone sends its chunk to the ranks that lack it."""
    scatter = tuple(Transfer(0, c, c, c, reduce=False) for c in range(1, n))
    spread = tuple(
        Transfer(src, (src + shift) % n, src, src, reduce=False)
        for shift in range(1, n)
        for src in range(n)
        if (src + shift) % n != 0
    )
    return Schedule(n, n, _nonempty(scatter, spread))


class Algorithm(NamedTuple):
    """What it does, under which name, and the function n -> Schedule."""

    collective: Collective
    name: str
    build: Callable[[int], Schedule]


ALGORITHMS = (
    Algorithm("all_reduce", "ring", ring_all_reduce),
    Algorithm("all_reduce", "direct", direct_all_reduce),
    Algorithm("reduce_scatter", "ring", ring_reduce_scatter),
    Algorithm("reduce_scatter", "direct", direct_reduce_scatter),
    Algorithm("all_gather", "ring", ring_all_gather),
    Algorithm("all_gather", "direct", direct_all_gather),
    Algorithm("broadcast", "ring", ring_broadcast),
    Algorithm("broadcast", "direct", direct_broadcast),
)


@cache
def schedule(collective: Collective, algorithm: str, n: int) -> Schedule:
    """The schedule of that name for n ranks. Not proved: see `verify`.

    Raises UsageError for an unknown collective or algorithm, or n < 1.
    """
    if n < 1:
        raise UsageError(f"a collective needs at least 1 rank, got {n}")
    if collective not in get_args(Collective):
        raise UsageError(f"no collective {collective!r}; there are {get_args(Collective)}")
    for a in ALGORITHMS:
        if (a.collective, a.name) == (collective, algorithm):
            return a.build(n)
    names = [a.name for a in ALGORITHMS if a.collective == collective]
    raise UsageError(f"no {collective} algorithm {algorithm!r}; there are {names}")


def _nonempty(*rounds: Round) -> tuple[Round, ...]:
    return tuple(r for r in rounds if r)
