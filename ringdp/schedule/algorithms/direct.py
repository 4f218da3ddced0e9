"""Direct: everyone sends to everyone at once.

Chunk c of n is owned by rank c.
"""

from __future__ import annotations

from collections.abc import Iterator

from ringdp.schedule.ir import Round, Schedule, Transfer


def direct_reduce_scatter(n: int) -> Schedule:
    """Everyone sends chunk c to rank c, which then folds the parts in rank order.

    One round that sends, (n-1)/n S, and n scratch chunks. Rank order makes the rounding of an
    element independent of chunk boundaries: this is what gives the same bits for every bucket size.
    """
    exchange = _exchange(n)
    return Schedule(n, n, _nonempty(exchange, *_fold(n, {r: r for r in range(n)}, n)))


def direct_reduce(n: int, root: int = 0) -> Schedule:
    """Everyone sends its buffer to the root, which folds them in rank order.

    One round that sends: S from every rank, (n-1) S to the root. The order of additions is that of
    ranks whatever the root, so that the result has the bits of a direct all_reduce.
    """
    inward = tuple(Transfer(r, root, 0, 1 + r, reduce=False) for r in range(n) if r != root)
    return Schedule(n, 1, _nonempty(inward, *_fold(n, {root: 0}, 1)))


def direct_gather(n: int) -> Schedule:
    """Everyone sends its chunk to rank 0. One round, S/n sent by each, (n-1)/n S received there."""
    return Schedule(n, n, _nonempty(tuple(Transfer(r, 0, r, r, False) for r in range(1, n))))


def direct_scatter(n: int) -> Schedule:
    """Rank 0 sends every rank its chunk. One round, (n-1)/n S sent by it."""
    return Schedule(n, n, _nonempty(tuple(Transfer(0, r, r, r, False) for r in range(1, n))))


def direct_all_gather(n: int) -> Schedule:
    """Everyone sends its chunk to everyone. One round, (n-1)/n S sent."""
    sends = tuple(Transfer(src, dst, src, src, reduce=False) for src, dst in _pairs(n))
    return Schedule(n, n, _nonempty(sends))


def direct_all_reduce(n: int) -> Schedule:
    """Direct reduce-scatter, then direct all-gather: two rounds that send, 2(n-1)/n S."""
    return direct_reduce_scatter(n).then(direct_all_gather(n))


def direct_broadcast(n: int) -> Schedule:
    """Rank 0 sends chunk c to rank c, then everyone sends its chunk to the ranks that lack it."""
    scatter = tuple(Transfer(0, c, c, c, reduce=False) for c in range(1, n))
    spread = tuple(Transfer(src, dst, src, src, reduce=False) for src, dst in _pairs(n) if dst)
    return Schedule(n, n, _nonempty(scatter, spread))


def direct_all_to_all(n: int) -> Schedule:
    """Everyone sends everyone its chunk at once: one round that sends, (n-1)/n S.

    What arrives waits in scratch until the chunk whose place it takes has been sent, so the last
    round is local.
    """
    return Schedule(n, n, _nonempty(_exchange(n), _settle(n)))


def pairwise_all_to_all(n: int) -> Schedule:
    """In round s rank r sends its chunk for rank r + s there: n - 1 rounds, (n-1)/n S sent.

    The direct one, a partner at a time (Thakur, Rabenseifner & Gropp 2005, pairwise exchange).
    """
    sends = _exchange(n)
    rounds = [sends[s * n : (s + 1) * n] for s in range(n - 1)]
    return Schedule(n, n, _nonempty(*rounds, _settle(n)))


def direct_all_to_all_v(n: int) -> Schedule:
    """Chunk s * n + d goes from rank s to rank d: one round.

    Every pair has a chunk of its own, which may have any size, 1/n^2 S on average, of which a rank
    sends n-1. It only touches those that it sends or receives, so it needs room for no others.
    """
    sends = tuple(
        Transfer(src, dst, src * n + dst, src * n + dst, reduce=False) for src, dst in _pairs(n)
    )
    return Schedule(n, n * n, _nonempty(sends))


def _exchange(n: int) -> Round:
    """Everyone sends chunk c to rank c, where the part of rank r waits in scratch chunk n + r."""
    return tuple(Transfer(src, dst, dst, n + src, reduce=False) for src, dst in _pairs(n))


def _pairs(n: int) -> Iterator[tuple[int, int]]:
    """(src, dst), all of them: first of every rank and the next one, then the one after that."""
    return ((src, (src + shift) % n) for shift in range(1, n) for src in range(n))


def _settle(n: int) -> Round:
    """Everyone copies the parts that wait in scratch home."""
    return tuple(
        Transfer(r, r, n + q, q, reduce=False) for r in range(n) for q in range(n) if q != r
    )


def _fold(n: int, owned: dict[int, int], scratch: int) -> tuple[Round, Round]:
    """Every owner adds the parts of its chunk in rank order: its own, and in chunk `scratch` + r
    that of rank r.

    Addition commutes, so rank 1 may start the fold from its own part, as rank 0 does; the others
    start it in the scratch chunk of rank 0's part and copy the result home.
    """

    def part(owner: int, rank: int) -> int:
        return owned[owner] if owner == rank else scratch + rank

    first = {owner: owner if owner < 2 else 0 for owner in owned}
    fold = tuple(
        Transfer(owner, owner, part(owner, rank), part(owner, first[owner]), reduce=True)
        for owner in owned
        for rank in range(n)
        if rank != first[owner]
    )
    home = tuple(
        Transfer(owner, owner, scratch, owned[owner], reduce=False) for owner in owned if owner > 1
    )
    return fold, home


def _nonempty(*rounds: Round) -> tuple[Round, ...]:
    return tuple(r for r in rounds if r)
