"""Rings: each rank talks to its neighbours only.

Chunk c of n is owned by rank c.
"""

from __future__ import annotations

from ringdp.schedule.ir import Schedule, Transfer


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


def two_way_reduce_scatter(n: int) -> Schedule:
    """Half of every shard goes round one way, half the other: links carry both directions at once.

    n - 1 rounds, (n-1)/n S sent, in messages of half the size to each neighbour.
    """
    mirror = [-i % n for i in range(n)]
    one_way = ring_reduce_scatter(n)
    both = one_way.beside(one_way.embed(mirror, mirror))
    return both.embed(range(n), [*range(0, 2 * n, 2), *range(1, 2 * n, 2)])


def two_way_all_gather(n: int) -> Schedule:
    """n - 1 rounds, (n-1)/n S sent."""
    return two_way_reduce_scatter(n).transpose()


def two_way_all_reduce(n: int) -> Schedule:
    """2(n-1) rounds, 2(n-1)/n S sent."""
    return two_way_reduce_scatter(n).then(two_way_all_gather(n))


def local_of(n: int) -> int:
    """The divisor of n nearest above its root."""
    return next(d for d in range(1, n + 1) if n % d == 0 and d * d >= n)


def hierarchical_all_reduce(n: int, local: int | None = None) -> Schedule:
    """Reduce-scatter inside each node, all-reduce between nodes, all-gather inside: slow links
    between nodes carry 1/local of the buffer.

    Ranks k*local ... (k+1)*local - 1 are node k. By default `local` is `local_of(n)`.
    2(local-1) + 2(n/local - 1) rounds, 2(n-1)/n S sent, of which 2(nodes-1)/n S between nodes.
    """
    local = local or local_of(n)
    nodes = n // local
    within = [
        ring_reduce_scatter(local).embed(
            range(k * local, (k + 1) * local),
            [range(c * nodes, (c + 1) * nodes) for c in range(local)],
            into=(n, n),
        )
        for k in range(nodes)
    ]
    between = [
        ring_all_reduce(nodes).embed(
            range(c, n, local), range(c * nodes, (c + 1) * nodes), into=(n, n)
        )
        for c in range(local)
    ]
    inner, outer = Schedule.together(within), Schedule.together(between)
    return inner.then(outer).then(inner.transpose())
