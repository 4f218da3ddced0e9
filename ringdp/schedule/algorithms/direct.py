"""Direct: everyone sends to everyone at once.

Chunk c of n is owned by rank c.
"""

from __future__ import annotations

from ringdp.schedule.ir import Round, Schedule, Transfer


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


def pairwise_all_to_all(n: int) -> Schedule:
    """In round s rank r sends its chunk for rank r + s there: n - 1 rounds, (n-1)/n S sent.

    What arrives waits in scratch until the chunk whose place it takes has been sent, so the last
    round is local (Thakur, Rabenseifner & Gropp 2005, pairwise exchange).
    """
    exchange = [
        tuple(Transfer(r, (r + s) % n, (r + s) % n, n + r, reduce=False) for r in range(n))
        for s in range(1, n)
    ]
    settle = tuple(
        Transfer(r, r, n + q, q, reduce=False) for r in range(n) for q in range(n) if q != r
    )
    return Schedule(n, n, _nonempty(*exchange, settle))


def _nonempty(*rounds: Round) -> tuple[Round, ...]:
    return tuple(r for r in rounds if r)
