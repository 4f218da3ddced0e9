"""Ring algorithms: each rank talks only to its neighbours.

Rank c owns chunk c.
"""

from __future__ import annotations

from ringdp.schedule.ir import Schedule, Transfer


def ring_reduce_scatter(n: int) -> Schedule:
    """Chunk c starts at rank c + 1 and collects every rank's part on its way round the ring to c.

    n - 1 rounds, (n-1)/n S sent (Patarasuk & Yuan 2009). The fold starts at a different rank for
    each chunk, so rounding depends on the chunk boundaries.
    """
    rounds = []
    for r in range(n - 1):
        sent = [(i - r - 1) % n for i in range(n)]
        rounds.append(tuple(Transfer(i, (i + 1) % n, c, c, True) for i, c in enumerate(sent)))
    return Schedule(n, n, tuple(rounds))


def ring_all_gather(n: int) -> Schedule:
    """Every rank's chunk travels once round the ring. n - 1 rounds, (n-1)/n S sent."""
    return ring_reduce_scatter(n).transpose()


def ring_all_reduce(n: int) -> Schedule:
    """Reduce-scatter, then all-gather. 2(n-1) rounds, 2(n-1)/n S sent, which is the minimum."""
    return ring_reduce_scatter(n).then(ring_all_gather(n))


def ring_broadcast(n: int) -> Schedule:
    """Rank 0's n chunks are pipelined along the chain 0, 1, ..., n-1.

    2n - 2 rounds. Each rank but the last sends S; every link carries one chunk at a time.
    """
    rounds = [
        tuple(Transfer(i, i + 1, r - i, r - i, False) for i in range(n - 1) if 0 <= r - i < n)
        for r in range(2 * n - 2)
    ]
    return Schedule(n, n, tuple(rounds))


def two_way_reduce_scatter(n: int) -> Schedule:
    """Two rings in opposite directions, each on half of every shard: links are used both ways.

    n - 1 rounds, (n-1)/n S sent, in messages of half the size to each neighbour.
    """
    mirror = [-i % n for i in range(n)]
    one_way = ring_reduce_scatter(n)
    both = one_way.beside(one_way.embed(mirror, mirror))
    return both.embed(range(n), [*range(0, 2 * n, 2), *range(1, 2 * n, 2)])


def two_way_all_gather(n: int) -> Schedule:
    """The reduce-scatter transposed. n - 1 rounds, (n-1)/n S sent."""
    return two_way_reduce_scatter(n).transpose()


def two_way_all_reduce(n: int) -> Schedule:
    """The ring both ways, each with half of every chunk. 2(n-1) rounds, 2(n-1)/n S sent."""
    return two_way_reduce_scatter(n).then(two_way_all_gather(n))


def local_of(n: int) -> int:
    """Return the smallest divisor of n that is at least sqrt(n)."""
    return next(d for d in range(1, n + 1) if n % d == 0 and d * d >= n)


def hierarchical_all_reduce(n: int, local: int | None = None) -> Schedule:
    """Reduce-scatter within each node, all-reduce between nodes, all-gather within each node.

    A rank's all-reduce between nodes is on 1/local of the buffer, which spares slow links. Node k
    has ranks k*local ... (k+1)*local - 1; `local` is `local_of(n)` by default.
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
