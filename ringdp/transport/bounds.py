"""Where the pieces of a buffer begin and end: the ranks' shards, and a program's chunks.

Pieces are contiguous: piece p is [bounds[p], bounds[p+1]).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from ringdp.errors import UsageError
from ringdp.schedule.program import Program

MOST = 256  # cached results per function
Bounds = tuple[int, ...]


def bounds_of(sizes: Iterable[int]) -> Bounds:
    return (0, *accumulate(sizes))


def shard_bounds(elements: int, ranks: int) -> Bounds:
    """Return the bounds of one shard per rank. The first `elements % ranks` are larger by one."""
    return bounds_of(_cut(elements, ranks))


@lru_cache(maxsize=MOST)
def chunk_bounds(elements: int, program: Program) -> Bounds:
    """Return the bounds of the program's chunks.

    If every rank owns equally many chunks, the buffer is first cut into one shard per rank and
    each shard into chunks, so that shards do not depend on the algorithm. Otherwise the buffer is
    cut into chunks directly. Pieces of one cut differ by at most one element, larger ones first.
    """
    shards = program.ranks if program.chunks % program.ranks == 0 else 1
    return uneven_bounds(tuple(_cut(elements, shards)), program)


@lru_cache(maxsize=MOST)
def uneven_bounds(shards: tuple[int, ...], program: Program) -> Bounds:
    """Return the bounds of the program's chunks for shards of these sizes.

    Raises UsageError, on every rank and before anything moves, if chunks that the program needs to
    be equally long are not.
    """
    sizes = [size for shard in shards for size in _cut(shard, program.chunks // len(shards))]
    for a, b in program.alike:
        if sizes[a] != sizes[b]:
            raise UsageError(
                f"the schedule needs chunks {a} and {b} to be equally long, as it copies or adds "
                f"one to the other; of {sum(shards)} elements they are {sizes[a]} and {sizes[b]}"
            )
    return bounds_of(sizes)


@lru_cache(maxsize=MOST)
def own_bounds(shards: tuple[int, ...], program: Program) -> tuple[Bounds, slice]:
    """Like `uneven_bounds`, but chunks that this rank neither owns nor touches are empty.

    Also returns this rank's shard of a buffer with these bounds.
    """
    each = program.chunks // program.ranks
    first, end = program.rank * each, (program.rank + 1) * each
    kept = program.touched | set(range(first, end))
    whole = enumerate(pairwise(uneven_bounds(shards, program)))
    bounds = bounds_of(stop - start if c in kept else 0 for c, (start, stop) in whole)
    return bounds, slice(bounds[first], bounds[end])


def pair_bounds(rank: int, sent: Sequence[int], received: Sequence[int]) -> Bounds:
    """Return the bounds of an all_to_all_v, whose chunk s * n + d goes from rank s to rank d.

    The buffer of `rank` holds, in this order, what it receives from ranks 0 ... rank - 1, what it
    sends to ranks 0 ... n - 1, and what it receives from ranks rank + 1 ... n - 1.
    """
    n = len(sent)
    sizes = [0] * (n * n)
    sizes[rank::n] = received
    sizes[rank * n : (rank + 1) * n] = sent
    return bounds_of(sizes)


def _cut(elements: int, pieces: int) -> list[int]:
    small, larger = divmod(elements, pieces)
    return [small + (p < larger) for p in range(pieces)]
