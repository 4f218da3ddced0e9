"""Ways to do the same take turns, step by step, so that a slow phase of the machine hits them all.

A time is the slowest rank's. A ratio is the median of the rounds' ratios, since phases last longer
than a round; what the medians of all times would say depends on which phase hit which way more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

ROUNDS, WARMUPS = 40, 3  # a round is a turn of each

Way = TypeVar("Way", bound=Hashable)


def interleaved(
    ways: Mapping[Way, Callable[[], object]], rounds: int = ROUNDS
) -> dict[Way, list[float]]:
    """Seconds of every turn but the warm-ups', over torch.distributed's default group."""
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for round_ in range(rounds + WARMUPS):
        for way, act in ways.items():
            dist.barrier()
            start = time.perf_counter()
            act()
            if round_ >= WARMUPS:
                times[way].append(time.perf_counter() - start)
    return {way: slowest(seconds) for way, seconds in times.items()}


def slowest(seconds: Sequence[float]) -> list[float]:
    """Of all ranks, for every turn."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    found: list[float] = times.tolist()
    return found


def ratio(way: Sequence[float], other: Sequence[float]) -> float:
    """How many times as long a turn takes as another way's of the same round."""
    return round(statistics.median(a / b for a, b in zip(way, other, strict=True)), 3)


def longer(way: Sequence[float], other: Sequence[float]) -> float:
    """How many seconds longer."""
    return statistics.median(a - b for a, b in zip(way, other, strict=True))


def spread(seconds: Sequence[float], unit: float) -> dict[str, float]:
    """`unit`: of them in a second."""
    times = [unit * s for s in seconds]
    found = {"min": min(times), "median": statistics.median(times), "max": max(times)}
    return {name: round(value, 2) for name, value in found.items()}
