"""Lets several ways to do the same take turns, so that a slow phase of the machine hits them all.

A time is the slowest rank's. A ratio is the median of the rounds' ratios: phases last longer than a
round, and the ratio of medians would depend on which phase hit which way.

Note [a job each]
    Ways in one process share its heap, so memory that one has freed spares the others page faults.
    So what users would start by itself is a job of its own (`between_jobs`); the parts of one way
    may share a process (`interleaved`). The layout of a heap is a matter of luck, so each job is
    started several times. The order of ways changes in every round, because a step may gain or lose
    by what ran just before it.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

import ringdp
from bench import jobs
from ringdp.cli.loopback import HOST, loopback_store

ROUNDS, WARMUPS = 30, 3  # a round is one turn of each way
STARTS = 6  # of each job, each with all rounds

Way = TypeVar("Way", bound=Hashable)


def interleaved(
    ways: Mapping[Way, Callable[[], object]], what: str, rounds: int
) -> dict[Way, list[float]]:
    """The seconds of each way's turns, over torch.distributed's default group.

    Warm-ups are left out. `what` is the label of the printed progress.
    """
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for round_ in range(rounds + WARMUPS):
        for way in random.Random(round_).sample(list(ways), len(ways)):
            dist.barrier()
            start = time.perf_counter()
            ways[way]()
            if round_ >= WARMUPS:
                times[way].append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            _progress(what, round_, rounds)
    return {way: slowest(seconds) for way, seconds in times.items()}


def between_jobs(
    ranks: int, ways: Mapping[Way, Callable[[], Callable[[], object]]], rounds: int
) -> dict[Way, list[float]]:
    """The same for ways that are jobs of `ranks` pinned processes: see Note [a job each].

    Each way's function, which must be importable, runs in its job. It creates a process group, and
    returns the function that a turn calls.
    """
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for start in range(STARTS):
        what = f"start {start + 1} of {STARTS}"
        for way, seconds in _started(ranks, ways, rounds, what).items():
            times[way] += seconds
    return times


def _started(
    ranks: int, ways: Mapping[Way, Callable[[], Callable[[], object]]], rounds: int, what: str
) -> dict[Way, list[float]]:
    store = loopback_store()
    store.set("0", "")
    with ThreadPoolExecutor(len(ways)) as threads:
        found = [
            threads.submit(
                jobs.run, ranks, _turns, make, place, len(ways), rounds, store.port, what
            )
            for place, make in enumerate(ways.values())
        ]
        ended, _ = wait(found, return_when=FIRST_EXCEPTION)
        del store  # so that jobs waiting for a turn notice another's error
        for job in ended:
            job.result()
    return {way: job.result() for way, job in zip(ways, found, strict=True)}


def _turns(
    make: Callable[[], Callable[[], object]],
    place: int,
    ways: int,
    rounds: int,
    port: int,
    what: str,
) -> list[float]:
    """The turns of one job. The store has a key for each turn that has begun."""
    store = dist.TCPStore(HOST, port, is_master=False)
    act = make()
    seconds = []
    for round_ in range(rounds + WARMUPS):
        order = random.Random(round_).sample(range(ways), ways)
        turn = ways * round_ + order.index(place)
        store.wait([f"{turn}"])
        dist.barrier()
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
        if order[-1] == place and dist.get_rank() == 0:
            _progress(what, round_, rounds)  # before the next turn begins
        if store.add(f"ended {turn}", 1) == dist.get_world_size():
            store.set(f"{turn + 1}", "")
    store.wait([f"{ways * (rounds + WARMUPS)}"])  # ending now would disturb others' turns
    return slowest(seconds[WARMUPS:])


def _progress(what: str, round_: int, rounds: int) -> None:
    print(f"{what}: round {round_ + 1} of {rounds + WARMUPS}", file=sys.stderr, flush=True)


def timed(
    clock: ringdp.Communicator, act: Callable[[], object], times: int, warmups: int = 2
) -> list[float]:
    """Seconds from the last rank's begin to the last rank's end, on their host's clock."""
    found = []
    for _ in range(warmups + times):
        clock.barrier()
        begin = time.monotonic()
        act()
        ends = torch.tensor([begin, time.monotonic()], dtype=torch.float64)
        clock.all_reduce(ends, "max")
        found.append((ends[1] - ends[0]).item())
    return found[warmups:]


def ms(says: float, times: Sequence[float]) -> list[float]:
    """A prediction, and the minimum, median and maximum of `times`, in ms."""
    return [round(1e3 * s, 3) for s in (says, min(times), statistics.median(times), max(times))]


def slowest(seconds: Sequence[float]) -> list[float]:
    """The slowest rank's time of every turn."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    found: list[float] = times.tolist()
    return found


def ratio(way: Sequence[float], other: Sequence[float]) -> float:
    """The median ratio of two ways' times of the same round."""
    return round(statistics.median(a / b for a, b in zip(way, other, strict=True)), 3)


def longer(way: Sequence[float], other: Sequence[float]) -> float:
    """The median difference of two ways' times of the same round, in seconds."""
    return statistics.median(a - b for a, b in zip(way, other, strict=True))


@dataclass(frozen=True)
class Row:
    """Times of a way's turns in ms, and `by`, their ratios to other ways'."""

    name: str
    min: float
    median: float
    max: float
    by: dict[str, float]


def rows(times: Mapping[str, Sequence[float]], **by: str) -> list[Row]:
    """A row per way. `by` names the ways that each is compared with."""
    return [
        Row(way, **spread(seconds, 1e3), by={n: ratio(seconds, times[o]) for n, o in by.items()})
        for way, seconds in times.items()
    ]


def spread(seconds: Sequence[float], unit: float) -> dict[str, float]:
    """Minimum, median and maximum in a unit of which a second has `unit`."""
    times = [unit * s for s in seconds]
    found = {"min": min(times), "median": statistics.median(times), "max": max(times)}
    return {name: round(value, 2) for name, value in found.items()}
