"""Recursive halving and doubling: a logarithmic number of rounds.

Halving splits the ranks in two, and the chunks with them: each half sends the other half the chunks
that the other will own. If the number of ranks is odd, the last rank of the larger half has no
partner and sends to the last rank of the smaller half. So it works for any n. For powers of two it
is Rabenseifner's algorithm (2004); Thakur, Rabenseifner & Gropp (2005) give its cost.
"""

from __future__ import annotations

from ringdp.schedule.ir import Schedule, Transfer


def halving_reduce_scatter(n: int) -> Schedule:
    """Recursive halving. ceil(log2 n) rounds; a rank sends at most (n-1)/n S."""
    rounds = [
        tuple(t for a, b in level for t in (*_send_half(a, b), *_send_half(b, a)))
        for level in levels(n)
    ]
    return Schedule(n, n, tuple(rounds))


def halving_all_gather(n: int) -> Schedule:
    """Recursive doubling: the halving reduce-scatter transposed. ceil(log2 n) rounds."""
    return halving_reduce_scatter(n).transpose()


def halving_all_reduce(n: int) -> Schedule:
    """Halving, then doubling. 2 ceil(log2 n) rounds; 2(n-1)/n S sent for powers of two."""
    return halving_reduce_scatter(n).then(halving_all_gather(n))


def doubling_all_reduce(n: int) -> Schedule:
    """Pairs at distance 1, 2, 4, ... exchange and add whole buffers.

    log2 n messages, the fewest possible, of S each. One chunk and one scratch chunk; each exchange
    is a round that sends and a local round that adds. Ranks beyond the largest power of two first
    add their buffer to a partner's, and receive the result at the end: two more rounds (Thakur,
    Rabenseifner & Gropp 2005).
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


def levels(n: int) -> list[list[tuple[range, range]]]:
    """Split groups of ranks in two until each is a single rank: the pairs of halves, by level."""
    found, groups = [], [range(n)]
    while groups := [g for g in groups if len(g) > 1]:
        level = [(g[: (len(g) + 1) // 2], g[(len(g) + 1) // 2 :]) for g in groups]
        found.append(level)
        groups = [half for halves in level for half in halves]
    return found


def _send_half(senders: range, receivers: range) -> list[Transfer]:
    """Every sender adds its part of the receivers' chunks to its partner among the receivers."""
    return [
        Transfer(sender, receivers[min(i, len(receivers) - 1)], chunk, chunk, reduce=True)
        for i, sender in enumerate(senders)
        for chunk in receivers
    ]
