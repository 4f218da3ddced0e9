"""One training step of a GPT under DDP: ours, torch's over gloo, and one process alone.

    torchrun --nproc-per-node 2 -m bench.ddp_step --json bench/results/ddp_step.json

Ranks are pinned to a core each, and all three take turns in short rounds, so that a slow phase of
the machine hits all of them. Alone means that rank 0 trains and the others sleep. The time of a
step is the slowest rank's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from ringdp.cli import gpt

SHAPE = gpt.Shape(context=512, width=432, heads=6, blocks=6)  # 13.8M parameters
ROWS, TOKENS = 1, 128
ROUNDS, STEPS = 12, 3  # a round is STEPS steps of each; the first one warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comm = ringdp.init()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank % os.cpu_count()]})
    dist.init_process_group("gloo")
    model = gpt.build(SHAPE, seed=0)
    wrapped: dict[str, nn.Module] = {
        "alone": copy.deepcopy(model),
        "torch": nn.parallel.DistributedDataParallel(copy.deepcopy(model)),
        "ringdp": ringdp.DistributedDataParallel(copy.deepcopy(model)),
    }
    step = {name: stepper(m, comm.rank) for name, m in wrapped.items()}
    times: dict[str, list[float]] = defaultdict(list)
    for round_ in range(arguments.rounds + 1):
        for name in wrapped:
            for _ in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                if name != "alone" or comm.rank == 0:
                    step[name]()
                if round_:
                    times[name].append(time.perf_counter() - start)
    parameters = sum(p.numel() for p in model.parameters())
    results = {name: summary(slowest(seconds)) for name, seconds in times.items()}
    if comm.rank == 0:
        report(results, parameters)
        if arguments.json:
            found = {"parameters": parameters, "ranks": comm.size, "step_ms": results}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


def stepper(model: nn.Module, rank: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(
        gpt.VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(rank)
    )

    def step() -> None:
        optimizer.zero_grad()
        gpt.next_byte_loss(model, tokens).backward()
        optimizer.step()

    return step


def slowest(seconds: list[float]) -> list[float]:
    """Of all ranks, for every step."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def summary(seconds: list[float]) -> dict[str, float]:
    ms = sorted(1e3 * s for s in seconds)
    return {
        "min": round(ms[0], 2),
        "median": round(statistics.median(ms), 2),
        "max": round(ms[-1], 2),
    }


def report(results: dict[str, dict[str, float]], parameters: int) -> None:
    alone = results["alone"]
    print(f"{parameters:,} parameters, batch {ROWS} x {TOKENS}, float32, AdamW")
    print("            min ms  median ms   max ms   x alone, min   x alone, median")
    for name, t in results.items():
        print(
            f"{name:<8} {t['min']:>9.1f} {t['median']:>10.1f} {t['max']:>8.1f} "
            f"{t['min'] / alone['min']:>14.2f} {t['median'] / alone['median']:>17.2f}"
        )


if __name__ == "__main__":
    main()
