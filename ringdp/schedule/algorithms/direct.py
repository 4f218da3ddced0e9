"""Direct algorithms: every rank sends to every other rank at once.

Rank c owns chunk c.
"""

from __future__ import annotations

from collections.abc import Iterator

from ringdp.schedule.ir import Round, Schedule, Transfer


def direct_reduce_scatter(n: int) -> Schedule:
    """Every rank sends chunk c to rank c, which then folds the parts in rank order.

    One round sends, (n-1)/n S; n scratch chunks. Because of the rank order, an element's rounding
    does not depend on chunk boundaries: the bits are the same for every bucket size.
    """
    exchange = _exchange(n)
    return Schedule(n, n, _nonempty(exchange, *_fold(n, {r: r for r in range(n)}, n)))


def direct_reduce(n: int, root: int = 0) -> Schedule:
    """Every rank sends its buffer to the root, which folds them in rank order.

    One round sends: S from every rank, (n-1) S to the root. The fold is in rank order whatever the
    root, so the result has the bits of a direct all_reduce.
    """
    inward = tuple(Transfer(r, root, 0, 1 + r, reduce=False) for r in range(n) if r != root)
    return Schedule(n, 1, _nonempty(inward, *_fold(n, {root: 0}, 1)))


def direct_gather(n: int) -> Schedule:
    """Every rank sends its chunk to rank 0. One round: S/n from each rank, (n-1)/n S to rank 0."""
    return Schedule(n, n, _nonempty(tuple(Transfer(r, 0, r, r, False) for r in range(1, n))))


def direct_scatter(n: int) -> Schedule:
    """Rank 0 sends every rank its chunk. One round: (n-1)/n S from rank 0."""
    return Schedule(n, n, _nonempty(tuple(Transfer(0, r, r, r, False) for r in range(1, n))))


def direct_all_gather(n: int) -> Schedule:
    """Every rank sends its chunk to every other rank. One round, (n-1)/n S sent."""
    sends = tuple(Transfer(src, dst, src, src, reduce=False) for src, dst in _pairs(n))
    return Schedule(n, n, _nonempty(sends))


def direct_all_reduce(n: int) -> Schedule:
    """Direct reduce-scatter, then direct all-gather. Two rounds send, 2(n-1)/n S."""
    return direct_reduce_scatter(n).then(direct_all_gather(n))


def direct_broadcast(n: int) -> Schedule:
    """Rank 0 sends chunk c to rank c; then every rank sends its chunk to the ranks that lack it."""
    scatter = tuple(Transfer(0, c, c, c, reduce=False) for c in range(1, n))
    spread = tuple(Transfer(src, dst, src, src, reduce=False) for src, dst in _pairs(n) if dst)
    return Schedule(n, n, _nonempty(scatter, spread))


def direct_all_to_all(n: int) -> Schedule:
    """Every rank sends each other rank its chunk at once. One round sends, (n-1)/n S.

    A received chunk stays in scratch until the chunk that it replaces has been sent, so the last
    round is local.
    """
    return Schedule(n, n, _nonempty(_exchange(n), _from_scratch(n)))


def pairwise_all_to_all(n: int) -> Schedule:
    """The direct all_to_all with one partner per round: n - 1 rounds, (n-1)/n S sent.

    In the s-th round rank r sends rank r + s its chunk (pairwise exchange; Thakur, Rabenseifner &
    Gropp 2005).
    """
    sends = _exchange(n)
    rounds = [sends[s * n : (s + 1) * n] for s in range(n - 1)]
    return Schedule(n, n, _nonempty(*rounds, _from_scratch(n)))


def direct_all_to_all_v(n: int) -> Schedule:
    """Rank s sends rank d chunk s * n + d. One round.

    Every pair has its own chunk of any size, on average S/n^2, and a rank sends n-1 of them. A rank
    touches only the chunks that it sends or receives, so it needs memory for no others.
    """
    sends = tuple(
        Transfer(src, dst, src * n + dst, src * n + dst, reduce=False) for src, dst in _pairs(n)
    )
    return Schedule(n, n * n, _nonempty(sends))


def _exchange(n: int) -> Round:
    """Every rank sends chunk c to rank c, which stores rank r's part in scratch chunk n + r."""
    return tuple(Transfer(src, dst, dst, n + src, reduce=False) for src, dst in _pairs(n))


def _pairs(n: int) -> Iterator[tuple[int, int]]:
    """Yield every pair (src, dst), src != dst: first all (r, r + 1), then all (r, r + 2), ..."""
    return ((src, (src + shift) % n) for shift in range(1, n) for src in range(n))


def _from_scratch(n: int) -> Round:
    """Every rank copies the received parts from scratch to their chunks."""
    return tuple(
        Transfer(r, r, n + q, q, reduce=False) for r in range(n) for q in range(n) if q != r
    )


def _fold(n: int, owned: dict[int, int], scratch: int) -> tuple[Round, Round]:
    """Return the rounds in which each owner folds the parts of its chunk in rank order.

    `owned` maps each owner to its chunk, which holds its own part; scratch chunk `scratch` + r
    holds rank r's. Rank 0 folds into its own part. So does rank 1, since addition commutes. The
    others fold into the scratch chunk of rank 0's part and copy the result to their chunk.
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
    copies = tuple(
        Transfer(owner, owner, scratch, owned[owner], reduce=False) for owner in owned if owner > 1
    )
    return fold, copies


def _nonempty(*rounds: Round) -> tuple[Round, ...]:
    return tuple(r for r in rounds if r)
