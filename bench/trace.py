"""What a trace costs: training steps and small collectives with one running and without, in turn.

    python -m bench.trace --json bench/results/trace.json

Two ranks are pinned to a core each. A round is STEPS steps of every stage with a trace, and as many
without; a step's time is the slowest rank's. Off, nothing in Python is added to a call: methods of
the engine are wrapped only while a trace runs. csrc looks at one flag of its thread for each row or
tile, and at one of the communicator for each call.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch

import ringdp
from bench import jobs
from bench.ddp_step import stepper
from bench.results import parser
from ringdp.cli import gpt
from ringdp.cli.files import write_json
from ringdp.tape import recorder

RANKS = 2
SHAPE = gpt.Shape(context=128)  # the demo's model: little to compute for each collective
ROWS = 4
STAGES = (0, 3)
ROUNDS, STEPS, CALLS = 14, 4, 2000  # the first round warms up


def main() -> None:
    arguments = parser(__doc__, ROUNDS).parse_args()
    rows = jobs.run(RANKS, measured, arguments.rounds)
    for name, row in rows.items():
        print(name, json.dumps(row, ensure_ascii=False))
    write_json(arguments.json, {"ranks": RANKS, "rounds": arguments.rounds, "rows": rows})


def measured(rounds: int) -> dict[str, dict[str, float]]:
    comm = ringdp.init()
    work = {f"step of stage {stage}, ms": (sharded(stage, comm), STEPS, 1e3) for stage in STAGES}
    small = torch.ones(1024)
    work["all_reduce of 4 KiB, µs"] = (lambda: calls(comm, small), 1, 1e6 / CALLS)
    return compared(comm, work, rounds)


def sharded(stage: int, comm: ringdp.Communicator) -> Callable[[], object]:
    model = gpt.build(SHAPE, seed=0)
    ringdp.shard(model, stage=stage, unit=gpt.Block, comm=comm)
    return stepper(model, torch.randint(gpt.VOCABULARY, (ROWS, SHAPE.context + 1)))


def calls(comm: ringdp.Communicator, tensor: torch.Tensor) -> None:
    for _ in range(CALLS):
        comm.all_reduce(tensor)


def compared(
    comm: ringdp.Communicator,
    work: dict[str, tuple[Callable[[], object], int, float]],
    rounds: int,
) -> dict[str, dict[str, float]]:
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
    return {name: row(comm, times[name, False], times[name, True]) for name in work}


def row(comm: ringdp.Communicator, off: list[float], on: list[float]) -> dict[str, float]:
    """Of the slowest rank's times. `slower`: the medians' ratio less one, and the minima's."""
    both = torch.tensor([off, on], dtype=torch.float64)
    comm.all_reduce(both, "max")
    off, on = both.tolist()
    return {
        "off_min": round(min(off), 3),
        "off_median": round(statistics.median(off), 3),
        "on_min": round(min(on), 3),
        "on_median": round(statistics.median(on), 3),
        "slower": round(statistics.median(on) / statistics.median(off) - 1, 4),
        "slower_minima": round(min(on) / min(off) - 1, 4),
        "samples": len(off),
    }


if __name__ == "__main__":
    main()
