"""The table of algorithms by name: pure functions n -> Schedule, one file per family.

A name may carry a parameter: `hierarchical:4` has four ranks per node.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple, get_args

from ringdp.errors import UsageError
from ringdp.schedule.algorithms import direct, halving, ring, trees
from ringdp.schedule.ir import Schedule

Collective = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_to_all",
    "all_to_all_v",
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


class Algorithm(NamedTuple):
    """One row of the table: the collective, the algorithm's name and the function to build it."""

    collective: Collective
    name: str
    build: Callable[[int], Schedule]
    # (n, root) -> Schedule, if another root takes more than renaming the ranks.
    at_root: Callable[[int, int], Schedule] | None = None


ALGORITHMS = (
    Algorithm("all_reduce", "ring", ring.ring_all_reduce),
    Algorithm("all_reduce", "two_way_ring", ring.two_way_all_reduce),
    Algorithm("all_reduce", "direct", direct.direct_all_reduce),
    Algorithm("all_reduce", "halving", halving.halving_all_reduce),
    Algorithm("all_reduce", "doubling", halving.doubling_all_reduce),
    Algorithm("all_reduce", "tree", trees.tree_all_reduce),
    Algorithm("all_reduce", "hierarchical", ring.hierarchical_all_reduce),
    Algorithm("reduce_scatter", "ring", ring.ring_reduce_scatter),
    Algorithm("reduce_scatter", "two_way_ring", ring.two_way_reduce_scatter),
    Algorithm("reduce_scatter", "direct", direct.direct_reduce_scatter),
    Algorithm("reduce_scatter", "halving", halving.halving_reduce_scatter),
    Algorithm("all_gather", "ring", ring.ring_all_gather),
    Algorithm("all_gather", "two_way_ring", ring.two_way_all_gather),
    Algorithm("all_gather", "direct", direct.direct_all_gather),
    Algorithm("all_gather", "halving", halving.halving_all_gather),
    Algorithm("broadcast", "ring", ring.ring_broadcast),
    Algorithm("broadcast", "direct", direct.direct_broadcast),
    Algorithm("broadcast", "binomial", trees.binomial_broadcast),
    Algorithm("reduce", "direct", direct.direct_reduce, direct.direct_reduce),
    Algorithm("reduce", "binomial", trees.binomial_reduce),
    Algorithm("scatter", "direct", direct.direct_scatter),
    Algorithm("scatter", "binomial", trees.binomial_scatter),
    Algorithm("gather", "direct", direct.direct_gather),
    Algorithm("gather", "binomial", trees.binomial_gather),
    Algorithm("all_to_all", "direct", direct.direct_all_to_all),
    Algorithm("all_to_all", "pairwise", direct.pairwise_all_to_all),
    Algorithm("all_to_all_v", "direct", direct.direct_all_to_all_v),
)


@cache
def schedule(collective: Collective, algorithm: str, n: int, root: int = 0) -> Schedule:
    """Return the named algorithm's schedule for n ranks. It is not proved here: see `verify`.

    `root` only matters for collectives that have one.

    Raises UsageError if the collective or algorithm is unknown, if n < 1, or if the algorithm does
    not support n ranks.
    """
    check_collective(collective, n)
    for a in ALGORITHMS:
        if (a.collective, a.name) == (collective, algorithm):
            return a.at_root(n, root) if a.at_root else rooted(a.build(n), root)
    if algorithm.startswith("hierarchical:") and collective == "all_reduce":
        return ring.hierarchical_all_reduce(n, _local(algorithm.removeprefix("hierarchical:"), n))
    names = [a.name for a in ALGORITHMS if a.collective == collective]
    raise UsageError(
        f"no {collective} algorithm {algorithm!r}; there are {', '.join(names)}, and your own as "
        "FILE.py:function"
    )


def check_collective(collective: str, n: int) -> None:
    """Raises UsageError if the collective is unknown or n < 1."""
    if n < 1:
        raise UsageError(f"a collective needs at least 1 rank, got {n}")
    if collective not in COLLECTIVES:
        raise UsageError(f"no collective {collective!r}; there are {', '.join(COLLECTIVES)}")


def rooted(plan: Schedule, root: int) -> Schedule:
    """Rename the ranks of `plan`, built for root 0: r becomes r + root mod n, and so do shards."""
    if root == 0:
        return plan
    n, each = plan.ranks, plan.chunks // plan.ranks if plan.chunks % plan.ranks == 0 else 0
    chunks = [(c + root * each) % plan.chunks for c in range(plan.chunks)]
    return plan.embed([(r + root) % n for r in range(n)], chunks)


def _local(text: str, n: int) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or not int(text) or n % int(text):
        raise UsageError(f"hierarchical:{text} needs a number of ranks per node that divides {n}")
    return int(text)
