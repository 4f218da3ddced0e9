"""Recursive halving and doubling: logarithmic rounds.

Halving splits the ranks in two, and the chunks with them: each side sends the other what the other
will own. With an odd number the larger side's last rank has no partner of its own and sends to the
smaller side's last. So it serves any n; for powers of two it is Rabenseifner's (2004), and Thakur,
Rabenseifner & Gropp (2005) give its cost.
"""

from __future__ import annotations

from ringdp.schedule.ir import Schedule, Transfer


def halving_reduce_scatter(n: int) -> Schedule:
    """ceil(log2 n) rounds; a rank sends (n-1)/n S at most."""
    rounds, groups = [], [range(n)]
    while any(len(g) > 1 for g in groups):
        halves = [(g[: -(-len(g) // 2)], g[-(-len(g) // 2) :]) for g in groups]
        rounds.append(tuple(t for a, b in halves for t in (*_hand_over(a, b), *_hand_over(b, a))))
        groups = [half for pair in halves for half in pair if half]
    return Schedule(n, n, tuple(rounds))


def halving_all_gather(n: int) -> Schedule:
    """Recursive doubling of what is held: ceil(log2 n) rounds."""
    return halving_reduce_scatter(n).transpose()


def halving_all_reduce(n: int) -> Schedule:
    """Halving, then doubling back: 2 ceil(log2 n) rounds; 2(n-1)/n S sent for powers of two."""
    return halving_reduce_scatter(n).then(halving_all_gather(n))


def doubling_all_reduce(n: int) -> Schedule:
    """Pairs at distance 1, 2, 4, ... exchange and add whole buffers: the fewest messages, log2 n,
    and as many S.

    One chunk and one scratch chunk; each exchange is a round that sends and a local one that adds.
    Ranks beyond the largest power of two first add theirs to a partner, and get the result at the
    end: two more (Thakur, Rabenseifner & Gropp 2005).
    """
    power = 1 << (n.bit_length() - 1)
    extra = [(power + i, i) for i in range(n - power)]
    fold = tuple(Transfer(e, r, 0, 0, reduce=True) for e, r in extra)
    rounds = [fold]
    distance = 1
    while distance < power:
        rounds += [
            tuple(Transfer(r, r ^ distance, 0, 1, reduce=False) for r in range(power)),
            tuple(Transfer(r, r, 1, 0, reduce=True) for r in range(power)),
        ]
        distance *= 2
    rounds.append(tuple(Transfer(r, e, 0, 0, reduce=False) for e, r in extra))
    return Schedule(n, 1, tuple(r for r in rounds if r))


def _hand_over(givers: range, takers: range) -> list[Transfer]:
    """Every giver adds its part of the takers' chunks to its partner among the takers."""
    return [
        Transfer(giver, takers[min(i, len(takers) - 1)], chunk, chunk, reduce=True)
        for i, giver in enumerate(givers)
        for chunk in takers
    ]
