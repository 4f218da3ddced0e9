"""The algorithms by name: short pure functions n -> Schedule, one file a family.

A name may carry a parameter, as in `hierarchical:4` (four ranks a node).
"""

from __future__ import annotations

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
]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


class Algorithm(NamedTuple):
    """What it does, under which name, and the function n -> Schedule."""

    collective: Collective
    name: str
    build: Callable[[int], Schedule]


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
    Algorithm("reduce", "binomial", trees.binomial_reduce),
    Algorithm("scatter", "binomial", trees.binomial_scatter),
    Algorithm("gather", "binomial", trees.binomial_gather),
    Algorithm("all_to_all", "pairwise", direct.pairwise_all_to_all),
)


@cache
def schedule(collective: Collective, algorithm: str, n: int) -> Schedule:
    """The schedule of that name for n ranks. Not proved: see `verify`.

    Raises UsageError for an unknown collective or algorithm, n < 1, or an n that it can't serve.
    """
    if n < 1:
        raise UsageError(f"a collective needs at least 1 rank, got {n}")
    if collective not in COLLECTIVES:
        raise UsageError(f"no collective {collective!r}; there are {', '.join(COLLECTIVES)}")
    for a in ALGORITHMS:
        if (a.collective, a.name) == (collective, algorithm):
            return a.build(n)
    if algorithm.startswith("hierarchical:") and collective == "all_reduce":
        return ring.hierarchical_all_reduce(n, _local(algorithm.removeprefix("hierarchical:"), n))
    names = [a.name for a in ALGORITHMS if a.collective == collective]
    raise UsageError(f"no {collective} algorithm {algorithm!r}; there are {', '.join(names)}")


def _local(text: str, n: int) -> int:
    if not text.isdecimal() or not int(text) or n % int(text):
        raise UsageError(f"hierarchical:{text} needs a number of ranks per node that divides {n}")
    return int(text)
