"""Measures the cost of a trace: training steps and small collectives with and without one.

    python -m bench.trace --json bench/results/trace.json

Two ranks are each pinned to a core. A round is STEPS steps of every stage with a trace, and as many
without. A step's time is the slowest rank's. Without a trace, calls do no extra work in Python: the
engine's methods are wrapped only while a trace runs. csrc checks one flag of its thread per row or
tile, and one of the communicator per call.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

import ringdp
from bench import jobs
from bench.ddp_step import batch, stepper
from bench.results import parser, record
from ringdp.cli import gpt
from ringdp.tape import recorder

RANKS = 2
SHAPE = gpt.Shape(context=128)  # the demo's model: little to compute for each collective
ROWS = 4
STAGES = (0, 3)
ROUNDS, STEPS, CALLS = 14, 4, 2000  # the first round warms up


@dataclass(frozen=True)
class Row:
    """The slowest rank's times, without and with a trace."""

    name: str
    off_min: float
    off_median: float
    on_min: float
    on_median: float
    samples: int

    @property
    def slower(self) -> float:
        """The relative slowdown, by medians."""
        return self.on_median / self.off_median - 1


def main(rounds: int) -> dict[str, object]:
    rows = jobs.run(RANKS, measured, rounds)
    for row in rows:
        print(f"{row.slower:+.1%}: {row}")
    return {"ranks": RANKS, "rounds": rounds, "rows": rows}


def measured(rounds: int) -> list[Row]:
    comm = ringdp.init()
    work = {f"step of stage {stage}, ms": (sharded(stage, comm), STEPS, 1e3) for stage in STAGES}
    small = torch.ones(1024)
    work["all_reduce of 4 KiB, µs"] = (lambda: calls(comm, small), 1, 1e6 / CALLS)
    return compared(comm, work, rounds)


def sharded(stage: int, comm: ringdp.Communicator) -> Callable[[], object]:
    model = gpt.build(SHAPE, seed=0)
    ringdp.shard(model, stage=stage, unit=gpt.Block, comm=comm)
    return stepper(model, batch(comm.rank, ROWS, SHAPE.context))


def calls(comm: ringdp.Communicator, tensor: torch.Tensor) -> None:
    for _ in range(CALLS):
        comm.all_reduce(tensor)


def compared(
    comm: ringdp.Communicator, work: dict[str, tuple[Callable[[], object], int, float]], rounds: int
) -> list[Row]:
    times: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for round_ in range(rounds + 1):
        for name, (act, repeats, unit) in work.items():
            for traced in (bool(round_ % 2), not round_ % 2):
                if traced:
                    recorder.start()
                for _ in range(repeats):
                    comm.barrier()
                    start = time.perf_counter()
                    act()
                    if round_:
                        times[name, traced].append((time.perf_counter() - start) * unit)
                if traced:
                    recorder.stop()
    return [row_of(name, comm, times[name, False], times[name, True]) for name in work]


def row_of(name: str, comm: ringdp.Communicator, off: list[float], on: list[float]) -> Row:
    both = torch.tensor([off, on], dtype=torch.float64)
    comm.all_reduce(both, "max")
    figures = [round(of(times), 4) for times in both.tolist() for of in (min, statistics.median)]
    return Row(name, *figures, samples=len(off))


if __name__ == "__main__":
    record(parser(__doc__, ROUNDS), main)
