"""Measures the cost of the guard, which makes every call explainable: all_reduce with and without.

    python -m bench.guard --json bench/results/guard.json

With: `comm.all_reduce(x)`, as a user calls it. Without: the same call, which does not look up the
user's line. Both take turns in short rounds on two ranks, each pinned to a core. What csrc writes
into the rank's record cannot be left out of a call, so it is timed by itself (guard.cpp) and added:

    cost = median over the rounds of (with - without) + record
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import ringdp
from bench import jobs
from bench.program import compiled
from bench.results import parser, record

RANKS = 2
BYTES = (4 << 10, 64 << 10, 1 << 20)
ROUNDS, SECONDS = 200, 0.02  # rounds of each at each size; length of a round in s


@dataclass(frozen=True)
class Row:
    """Medians of the rounds, in µs per call; `more_us` is with - without of the same round."""

    bytes: int
    with_us: float
    without_us: float
    more_us: float
    record_us: float

    @property
    def cost_us(self) -> float:
        return self.more_us + self.record_us

    @property
    def ratio(self) -> float:
        return self.cost_us / (self.with_us - self.cost_us)


def main() -> dict[str, object]:
    rows = jobs.run(RANKS, measured)
    for row in rows:
        print(f"{row.bytes:>9,} bytes: {row.cost_us:.2f} µs, {100 * row.ratio:.1f} %  {row}")
    return {"rows": rows}


def measured() -> list[Row]:
    comm = ringdp.init()
    record = record_us() if comm.rank == 0 else 0.0
    return [of_size(comm, size, record) for size in BYTES]


def of_size(comm: ringdp.Communicator, size: int, record: float) -> Row:
    x, ready = torch.zeros(size // 4), comm._ready
    assert ready, "an older torch: every call goes through Python"
    calls = max(20, int(SECONDS / seconds(comm, x, 200)))
    agreed = torch.tensor([calls])
    comm.broadcast(agreed)
    times: list[list[float]] = [[], []]
    for round_ in range(ROUNDS):
        for k in (round_ % 2, 1 - round_ % 2):
            ready.told = k == 0
            times[k].append(1e6 * seconds(comm, x, int(agreed)))
    ready.told = True
    more = [with_ - without for with_, without in zip(*times, strict=True)]
    found = [round(statistics.median(t), 3) for t in (*times, more)]
    return Row(size, *found, record)


def seconds(comm: ringdp.Communicator, x: Tensor, calls: int) -> float:
    """Seconds per call."""
    comm.all_reduce(x)
    start = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(x)
    return (time.perf_counter() - start) / calls


def record_us() -> float:
    with compiled("guard.cpp") as run:
        return round(float(run()) / 1e3, 4)


if __name__ == "__main__":
    record(parser(__doc__), main)
