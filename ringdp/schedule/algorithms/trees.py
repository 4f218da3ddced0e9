"""Tree algorithms: one rank to all, all ranks to one, and a double tree for all-reduce."""

from __future__ import annotations

from ringdp.schedule.algorithms.halving import levels
from ringdp.schedule.ir import Schedule, Transfer


def binomial_broadcast(n: int) -> Schedule:
    """The first rank of each group sends the buffer to the first rank of its second half.

    ceil(log2 n) rounds; rank 0 sends ceil(log2 n) S. For powers of two this is the binomial tree.
    """
    rounds = [
        tuple(Transfer(a[0], b[0], 0, 0, reduce=False) for a, b in level) for level in levels(n)
    ]
    return Schedule(n, 1, tuple(rounds))


def binomial_reduce(n: int) -> Schedule:
    """The broadcast transposed. ceil(log2 n) rounds; every rank but 0 sends S once."""
    return binomial_broadcast(n).transpose()


def binomial_scatter(n: int) -> Schedule:
    """The first rank of each group sends on the chunks of its second half.

    ceil(log2 n) rounds; rank 0 sends (n-1)/n S.
    """
    rounds = [
        tuple(Transfer(a[0], b[0], chunk, chunk, reduce=False) for a, b in level for chunk in b)
        for level in levels(n)
    ]
    return Schedule(n, n, tuple(rounds))


def binomial_gather(n: int) -> Schedule:
    """The scatter in reverse. (Not its transpose, which would add to undefined chunks.)"""
    rounds = [
        tuple(Transfer(t.dst, t.src, t.write, t.read, reduce=False) for t in r)
        for r in reversed(binomial_scatter(n).rounds)
    ]
    return Schedule(n, n, tuple(rounds))


def tree_all_reduce(n: int) -> Schedule:
    """Double binary tree: each half of the buffer goes up its own tree and down again.

    2 ceil(log2 n) rounds. Every rank is a leaf in one of the two trees (except one rank if n is
    odd), so no rank sends more than 2 S (Sanders, Speck & Träff 2009; NCCL's trees since 2.4).
    """
    up = _tree_reduce(n)
    other = [n - 1 - r if n % 2 == 0 else (r + 1) % n for r in range(n)]
    both = up.beside(up.embed(other, range(1)))
    return both.then(both.transpose())


def _tree_reduce(n: int) -> Schedule:
    """Reduce up an in-order binary tree rooted at 0.

    A rank's height is the index of its lowest set bit; its parent is the nearest higher rank in the
    tree.
    """

    def parent(rank: int) -> int:
        bit = rank & -rank
        above = (rank ^ bit) | bit << 1
        return above if above < n else rank ^ bit

    rounds = [
        tuple(Transfer(r, parent(r), 0, 0, reduce=True) for r in range(1 << h, n, 2 << h))
        for h in range((n - 1).bit_length())
    ]
    return Schedule(n, 1, tuple(rounds))
