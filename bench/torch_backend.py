"""What torch.distributed costs over our backend and over gloo: a small all_reduce, DDP and FSDP2.

    python -m bench.torch_backend --json bench/results/torch_backend.json

Two ranks, pinned to a core each, hold a group of either backend; both take turns in short rounds,
so that a slow phase of the machine hits both. A time is the slowest rank's, of one call or step.
DDP and FSDP2 (a unit for each block) train the 13.8M-parameter GPT of `bench.ddp_step`, on rows of
its length, with AdamW.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringdp  # noqa: F401  registers the backend
from bench.ddp_step import SHAPE, stepper, summary
from ringdp.cli import gpt
from ringdp.cli.bench.machine import machine

RANKS, BACKENDS = 2, ("ringdp", "gloo")
ELEMENTS = 1024  # float32: 4 KiB
CALLS, STEPS, WARMUPS = 50, 2, 2  # of each in a round; rounds that do not count


@dataclass(frozen=True)
class TorchRow:
    """Milliseconds of one call, or of one training step."""

    case: str
    backend: str
    ranks: int
    min: float
    median: float
    max: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=16)
    arguments = parser.parse_args()
    processes.spawn(rank_main, (arguments.rounds, arguments.json), nprocs=RANKS)


def rank_main(rank: int, rounds: int, file: Path | None) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    dist.init_process_group("gloo")
    found = measured(rounds)
    if rank == 0:
        report(found)
        if file:
            rows = [asdict(row) for row in found]
            file.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def measured(rounds: int) -> list[TorchRow]:
    cases: dict[tuple[str, str], Callable[[], object]] = {}
    model = gpt.build(SHAPE, seed=0)
    for backend in BACKENDS:
        group = dist.new_group(backend=backend)
        tensor = torch.ones(ELEMENTS)
        cases["all_reduce, 4 KiB", backend] = lambda t=tensor, g=group: dist.all_reduce(t, group=g)
        for name, wrap in (("DDP step", ddp), ("FSDP2 step", fsdp2)):
            cases[name, backend] = stepper(wrap(copy.deepcopy(model), group), dist.get_rank())
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for round_ in range(rounds + WARMUPS):
        for case, act in cases.items():
            for _ in range(CALLS if case[0].startswith("all") else STEPS):
                dist.barrier()
                start = time.perf_counter()
                act()
                if round_ >= WARMUPS:
                    times[case].append(time.perf_counter() - start)
    return [TorchRow(*case, RANKS, **slowest(seconds)) for case, seconds in times.items()]


def ddp(model: gpt.GPT, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def fsdp2(model: gpt.GPT, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def slowest(seconds: list[float]) -> dict[str, float]:
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return summary(times.tolist())
