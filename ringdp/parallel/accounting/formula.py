"""The exact bytes that a rank must hold, by `memory` category, and send in a step.

A unit's bucket exists from the start of its backward to the end of its reduction, the root's during
the whole backward (see `dry_run.peaks`).

The formulas hold for a step of one forward and one backward in which every unit is called once and
none inside another. Gradients that accumulate over several backwards need buckets in stages 0 and 1
too, and gradients of no_sync the size of their unit in the masters' dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ringdp.parallel.accounting.dry_run import Event, iteration, peaks
from ringdp.parallel.accounting.memory import Memory, Widths
from ringdp.parallel.layout import Unit
from ringdp.parallel.prefetch import Groups
from ringdp.parallel.stages import Stage


class Sharding(NamedTuple):
    """How an engine shards a model."""

    units: Sequence[Unit]
    widths: Sequence[Widths]  # of each unit
    groups: Groups  # the units of each module, the root's first
    stage: Stage
    limit: int  # bytes to gather ahead
    kept: Collection[int] = ()  # units that are not freed after their forward, beside the root's
    replicas: int = 1
    near: Sequence[int] = ()  # of each unit, its `reshard_size`, or 0

    @property
    def each(self) -> list[tuple[Unit, Widths]]:
        return list(zip(self.units, self.widths, strict=True))

    @property
    def sizes(self) -> list[int]:
        """The bytes that gathering each unit takes: none if it is never freed, so that prefetching
        has no bound."""
        return [w.compute * u.padded if self.stage.freed else 0 for u, w in self.each]

    @property
    def pieces(self) -> list[int]:
        """The bytes that a rank keeps of each unit from its forward to the end of backward."""
        near = self.near or [0] * len(self.units)
        return [size // n if n else 0 for size, n in zip(self.sizes, near, strict=True)]

    def iteration(
        self, *, buckets: Sequence[int] = (), overlap: bool = True, yields: bool = False
    ) -> list[Event]:
        """See `dry_run.iteration`."""
        return iteration(
            self.sizes,
            self.groups,
            self.limit,
            freed=self.stage.freed,
            kept=self.kept,
            pieces=self.pieces,
            buckets=buckets,
            overlap=overlap,
            yields=yields,
        )


def formula(
    given: Sharding,
    rank: int,
    *,
    overlap: bool = True,
    yields: bool = True,
    per_element: int,
    per_parameter: int,
) -> Memory:
    """Exact bytes per rank. For Adam in float32: 8 bytes per element, 4 per parameter (`step`).

    In elements, with Ψ the sum of the units' padded sizes: parameters Ψ or Ψ/n, gradients Ψ or Ψ/n,
    the optimizer its elements of Ψ or Ψ/n without padding (Rajbhandari et al. 2020, figure 1);
    gathered units and buckets by replaying an iteration. `overlap`, `yields`: see
    `dry_run.iteration`.
    """
    stage, each = given.stage, given.each
    trained = [u for u, w in each if w.trainable]
    if stage.slices:
        owned = [elements for u in trained for elements in u.owned(rank)]
    else:
        owned = [e.elements for u in trained for e in u.entries]
    buckets = [w.bucket(u, stage) for u, w in each]
    events = given.iteration(buckets=buckets, overlap=overlap, yields=yields)
    gathered, passing = peaks(events, given.sizes, buckets, given.pieces)
    return Memory(
        parameters=sum(w.parameters(u, stage) for u, w in each),
        gathered_peak=gathered,
        gradients=sum(w.gradients(u, stage) for u, w in each),
        buckets=passing - gathered,
        optimizer=per_element * sum(owned) + per_parameter * len(owned),
    )


def traffic(given: Sharding) -> int:
    """Exact bytes that one rank sends in a step.

    A reduce_scatter or an all_gather sends n - 1 shards, an all_reduce twice that. Stage 3 gathers
    twice what it frees between forward and backward: all but the root, the `kept`, and the last
    unit if `limit` lets it stay. The second gather sends pieces to fewer ranks with a
    `reshard_size`. Frozen units are not reduced. With replicas an all_reduce of the rank's shard
    over these follows its reduce_scatter.
    """
    others = given.replicas - 1
    reductions = 2 if given.stage.reduction == "all_reduce" else 1
    events = Counter(given.iteration())
    gathers = [
        events[Event("gather", i)] if given.stage.freed else given.stage.gathers
        for i in range(len(given.units))
    ]
    return sum(
        (u.ranks - 1) * u.shard * (w.compute * gathers[i] + w.reduce * reductions * w.trainable)
        + (given.sizes[i] - given.pieces[i]) * events[Event("gather_near", i)]
        + 2 * others * (u.shard // given.replicas) * w.reduce * w.trainable
        for i, (u, w) in enumerate(given.each)
    )
