"""The exact bytes that a rank must hold, by `memory` category, and send in a step.

A unit's bucket exists from the start of its backward to the end of its reduction, the root's during
the whole backward (see `dry_run.peaks`).

The formulas hold for a step of one forward and one backward in which every unit is called once and
none inside another. Gradients that accumulate over several backwards need buckets in stages 0 and 1
too, and gradients of no_sync the size of their unit in the masters' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringdp.parallel.accounting.dry_run import gathers, iteration, peaks
from ringdp.parallel.accounting.memory import Memory, Widths
from ringdp.parallel.layout import Unit
from ringdp.parallel.stages import Keep, Stage


def formula(
    units: Sequence[Unit],
    groups: Sequence[Sequence[int]],
    stage: Stage,
    rank: int,
    *,
    widths: Sequence[Widths],
    limit: int,
    overlap: bool = True,
    yields: bool = True,
    per_element: int,
    per_parameter: int,
) -> Memory:
    """Exact bytes per rank. For Adam in float32: 8 bytes per element, 4 per parameter (`step`).

    In elements, with Ψ the sum of the units' padded sizes: parameters Ψ or Ψ/n, gradients Ψ or Ψ/n,
    the optimizer its elements of Ψ or Ψ/n without padding (Rajbhandari et al. 2020, figure 1);
    gathered units and buckets by replaying an iteration. `groups`: units of one module, the root's
    first. `limit`, `overlap`, `yields`: see `dry_run.iteration`.
    """
    each = list(zip(units, widths, strict=True))
    trained = [u for u, w in each if w.trainable]
    if stage.optimizer is Keep.FULL:
        owned = [e.elements for u in trained for e in u.entries if e.elements]
    else:
        owned = [elements for u in trained for elements in u.owned(rank)]
    freed = stage.parameters is Keep.SHARD
    sizes = [w.compute * u.padded if freed else 0 for u, w in each]
    buckets = [w.bucket(u, stage) for u, w in each]
    events = iteration(
        sizes, groups, limit, freed=freed, buckets=buckets, overlap=overlap, yields=yields
    )
    gathered, passing = peaks(events, sizes, buckets)
    return Memory(
        parameters=sum(w.parameters(u, stage) for u, w in each),
        gathered_peak=gathered,
        gradients=sum(w.gradients(u, stage) for u, w in each),
        buckets=passing - gathered,
        optimizer=per_element * sum(owned) + per_parameter * len(owned),
    )


def traffic(
    units: Sequence[Unit],
    groups: Sequence[Sequence[int]],
    stage: Stage,
    *,
    widths: Sequence[Widths],
    limit: int,
) -> int:
    """Exact bytes that one rank sends in a step.

    A reduce_scatter or an all_gather sends n - 1 shards, an all_reduce twice that. Stage 3 gathers
    twice what it frees between forward and backward (see `dry_run.gathers`); frozen units are not
    reduced.
    """
    reductions = 2 if stage.reduction == "all_reduce" else 1
    often = dict.fromkeys(range(len(units)), stage.gathers)
    if stage.parameters is Keep.SHARD:
        sizes = [w.compute * u.padded for u, w in zip(units, widths, strict=True)]
        often |= gathers(sizes, groups, limit)
    return sum(
        (u.ranks - 1) * u.shard * (w.compute * often[i] + w.reduce * reductions * w.trainable)
        for i, (u, w) in enumerate(zip(units, widths, strict=True))
    )
