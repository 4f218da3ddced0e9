"""Trees: one rank to all, all to one, and two trees at once for an all-reduce."""

from __future__ import annotations

from typing import NamedTuple

from ringdp.schedule.ir import Schedule, Transfer


class Split(NamedTuple):
    """Ranks first..last-1, led by `first`, fall in two; the second half is led by `middle`."""

    first: int
    middle: int
    last: int


def binomial_broadcast(n: int) -> Schedule:
    """Each leader passes the buffer to the leader of the far half of its ranks.

    ceil(log2 n) rounds; rank 0 sends ceil(log2 n) S. For powers of two the binomial tree.
    """
    return Schedule(
        n,
        1,
        tuple(
            tuple(Transfer(s.first, s.middle, 0, 0, reduce=False) for s in level)
            for level in _levels(n)
        ),
    )


def binomial_reduce(n: int) -> Schedule:
    """The broadcast transposed: ceil(log2 n) rounds; every rank but 0 sends S once."""
    return binomial_broadcast(n).transpose()


def binomial_scatter(n: int) -> Schedule:
    """Each leader passes on the chunks of the far half of its ranks: ceil(log2 n) rounds, (n-1)/n S
    sent by rank 0."""
    return Schedule(
        n,
        n,
        tuple(
            tuple(
                Transfer(s.first, s.middle, chunk, chunk, reduce=False)
                for s in level
                for chunk in range(s.middle, s.last)
            )
            for level in _levels(n)
        ),
    )


def binomial_gather(n: int) -> Schedule:
    """The scatter backwards. (Not its transpose, which would add to chunks that hold nothing.)"""
    return Schedule(
        n,
        n,
        tuple(
            tuple(Transfer(t.dst, t.src, t.write, t.read, reduce=False) for t in r)
            for r in reversed(binomial_scatter(n).rounds)
        ),
    )


def tree_all_reduce(n: int) -> Schedule:
    """Double binary tree: each half of the buffer goes up a tree and down again.

    Every rank is a leaf in one of the trees (but for one rank where n is odd), so that none sends
    more than 2 S, in 2 ceil(log2 n) rounds (Sanders, Speck & Träff 2009; NCCL's trees since 2.4).
    """
    up = _tree_reduce(n)
    other = [n - 1 - r if n % 2 == 0 else (r + 1) % n for r in range(n)]
    both = up.beside(up.embed(other, range(1)))
    return both.then(both.transpose())


def _tree_reduce(n: int) -> Schedule:
    """In-order binary tree rooted at 0. A rank's height is that of its lowest set bit, and it sends
    to the nearest rank that is higher."""

    def parent(rank: int) -> int:
        bit = rank & -rank
        above = (rank ^ bit) | bit << 1
        return above if above < n else rank ^ bit

    heights = range((n - 1).bit_length())
    return Schedule(
        n,
        1,
        tuple(
            tuple(Transfer(r, parent(r), 0, 0, reduce=True) for r in range(1 << h, n, 2 << h))
            for h in heights
        ),
    )


def _levels(n: int) -> list[list[Split]]:
    levels, groups = [], [(0, n)]
    while any(last - first > 1 for first, last in groups):
        level = [
            Split(first, first + (last - first + 1) // 2, last)
            for first, last in groups
            if last - first > 1
        ]
        levels.append(level)
        halves = {s.first: [(s.first, s.middle), (s.middle, s.last)] for s in level}
        groups = [half for g in groups for half in halves.get(g[0], [g])]
    return levels
