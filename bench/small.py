"""Times the parts of a small all_reduce: the exchange alone, and what Python adds to it.

    python -m bench.small --json bench/results/small.json

    exchange    a loop in C++ on two cores (small.cpp), without Python, tensors or callers' lines
    method      a C++ method that does nothing, called from Python
    alone       comm.all_reduce(x) on one rank: a whole call but for the exchange

No call from Python can take less than method + exchange; ringdp's takes alone + exchange.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

import ringdp
from bench.program import compiled
from bench.results import parser, record
from ringdp.cli.bench.kernels import by_the_clock

BYTES = (1 << 10, 4 << 10)
ROUNDS, CALLS = 20, 50_000  # of method and alone


@dataclass(frozen=True)
class Small:
    """Times in µs: medians of calls for exchanges, by bytes; the best round for the rest."""

    exchange_us: dict[str, float]
    method_us: float
    alone_us: float


def measured() -> Small:
    """Raises CalledProcessError if the C++ program does not compile."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    exchanges = exchange_us((cores[0], cores[1 % len(cores)]))
    os.sched_setaffinity(0, cores[:1])
    with ringdp.init() as comm:
        x = torch.zeros(BYTES[0] // 4)
        nothing = _best_us(lambda: None)
        core = comm._transport._core  # type: ignore[attr-defined]
        method, alone = _best_us(core.sent_bytes), _best_us(lambda: comm.all_reduce(x))
    return Small(exchanges, method, round(alone - nothing, 3))


def exchange_us(cores: tuple[int, int]) -> dict[str, float]:
    with compiled("small.cpp") as run:
        return {str(size): int(run(size, *cores)) / 1e3 for size in BYTES}


def _best_us(call: Callable[[], object]) -> float:
    return round(1e6 * min(by_the_clock(call, CALLS) for _ in range(ROUNDS)), 3)


def main() -> dict[str, object]:
    found = measured()
    print(found)
    return {"times": found}


if __name__ == "__main__":
    record(parser(__doc__), main)
