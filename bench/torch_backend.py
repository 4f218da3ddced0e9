"""What torch.distributed costs over our backend and over gloo: a small all_reduce, DDP and FSDP2.

    python -m bench.torch_backend --json bench/results/torch_backend.json

Two ranks, pinned to a core each, hold a group of either backend, and both take turns
(`bench.turns`). DDP and FSDP2 (a unit for each block) train the 13.8M-parameter GPT of
`bench.ddp_step`, on rows of its length, with AdamW.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringdp  # noqa: F401  registers the backend
from bench.ddp_step import SHAPE, stepper
from bench.pinned import pin
from bench.turns import ROUNDS, interleaved, ratio, spread
from ringdp.cli import gpt
from ringdp.cli.bench.machine import describe

RANKS, BACKENDS = 2, ("ringdp", "gloo")
NOTHING = "nothing"  # is reduced: less a backend cannot take
ELEMENTS = 1024  # float32: 4 KiB
CALLS = 50  # timed at once


@dataclass(frozen=True)
class TorchRow:
    """µs of one call, or of one training step, and how many times as long as gloo's it takes."""

    case: str
    backend: str
    min: float
    median: float
    max: float
    by_gloo: float


@dataclass(frozen=True)
class Report:
    """A file of results."""

    machine: dict[str, str]
    rows: list[TorchRow]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    processes.spawn(rank_main, (arguments.rounds, arguments.json), nprocs=RANKS)


def rank_main(rank: int, rounds: int, file: Path | None) -> None:
    cores = os.sched_getaffinity(0)
    pin(rank)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    machine = describe(min(RANKS, len(cores)))
    dist.init_process_group("gloo")
    found = Report(machine, measured(rounds))
    if rank == 0:
        for row in found.rows:
            print(json.dumps(asdict(row)))
        if file:
            file.write_text(json.dumps(asdict(found), indent=1) + "\n")
    dist.destroy_process_group()


def measured(rounds: int) -> list[TorchRow]:
    cases: dict[tuple[str, str], Callable[[], object]] = {}
    model = gpt.build(SHAPE, seed=0)
    for backend in BACKENDS:
        group = dist.new_group(backend=backend)
        cases["all_reduce of 4 KiB", backend] = partial(calls, torch.zeros(ELEMENTS), group)
        for name, wrap in (("DDP step", ddp), ("FSDP2 step", fsdp2)):
            cases[name, backend] = stepper(wrap(copy.deepcopy(model), group), dist.get_rank())
    cases["DDP step", NOTHING] = stepper(unreduced(copy.deepcopy(model)), dist.get_rank())
    times = interleaved(dict(sorted(cases.items())), rounds)
    return [
        TorchRow(
            case,
            backend,
            **spread(seconds, 1e6 / (CALLS if case.startswith("all_reduce") else 1)),
            by_gloo=ratio(seconds, times[case, "gloo"]),
        )
        for (case, backend), seconds in times.items()
    ]


def calls(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    for _ in range(CALLS):
        dist.all_reduce(tensor, group=group)


def ddp(model: gpt.GPT, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def unreduced(model: gpt.GPT) -> nn.Module:
    """DDP whose gradients stay this rank's."""
    net = DistributedDataParallel(model)
    net.register_comm_hook(None, keep)
    return net


def keep(_, bucket):  # torch refuses annotations that are strings, as they are in this file
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fsdp2(model: gpt.GPT, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    main()
