"""Times torch.distributed over ringdp's backend and over gloo: a small all_reduce, DDP, FSDP2.

    python -m bench.torch_backend --json bench/results/torch_backend.json

Each case is a job of two ranks, each pinned to a core, and the jobs take turns (`bench.turns`). DDP
and FSDP2 (a unit per block) train the 13.8M-parameter GPT of `bench.ddp_step`, on the same rows,
with AdamW. `nothing` is DDP with a hook that leaves each rank its own gradients. All but `gloo`
keep freed memory, as ranks of ringdp always do (`ringdp.transport.heap`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringdp  # noqa: F401  registers the backend
from bench.ddp_step import KEPT, RANKS, SHAPE, batch, stepper
from bench.results import parser, record
from bench.turns import ROUNDS, between_jobs, ratio, spread
from ringdp.cli import gpt
from ringdp.transport import heap

NOTHING = "nothing"  # is reduced: a lower bound for any backend
SMALL = "all_reduce of 4 KiB"
CASES = [
    *(("DDP step", backend) for backend in ("gloo", f"gloo{KEPT}", NOTHING, "ringdp")),
    *(("FSDP2 step", backend) for backend in ("gloo", f"gloo{KEPT}", "ringdp")),
    *((SMALL, backend) for backend in ("gloo", f"gloo{KEPT}", "ringdp")),
]
ELEMENTS = 1024  # float32: 4 KiB
CALLS = 200  # timed at once, so that cold caches after other jobs count little


@dataclass(frozen=True)
class Row:
    """Times in µs of a call or a training step.

    `by_gloo` and `by_kept` are ratios to gloo's time, without and with freed memory kept.
    """

    case: str
    backend: str
    min: float
    median: float
    max: float
    by_gloo: float
    by_kept: float


def main(rounds: int) -> dict[str, object]:
    times = between_jobs(RANKS, {case: partial(made, *case) for case in CASES}, rounds)
    rows = [
        Row(
            case,
            backend,
            **spread(seconds, 1e6 / (CALLS if case == SMALL else 1)),
            by_gloo=ratio(seconds, times[case, "gloo"]),
            by_kept=ratio(seconds, times[case, f"gloo{KEPT}"]),
        )
        for (case, backend), seconds in times.items()
    ]
    for row in rows:
        print(row)
    return {"rows": rows}


def made(case: str, backend: str) -> Callable[[], object]:
    """Make the function to time on this rank."""
    dist.init_process_group("ringdp" if backend == "ringdp" else "gloo")
    if backend != "gloo":
        heap.keep()
    if case == SMALL:
        return partial(calls, torch.zeros(ELEMENTS))
    model = gpt.build(SHAPE, seed=0)
    net = fsdp2(model) if case.startswith("FSDP2") else DistributedDataParallel(model)
    if backend == NOTHING:
        net.register_comm_hook(None, keep)
    return stepper(net, batch(dist.get_rank()))


def calls(tensor: torch.Tensor) -> None:
    for _ in range(CALLS):
        dist.all_reduce(tensor)


def keep(_, bucket):  # torch rejects annotations that are strings, as in this file
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fsdp2(model: gpt.GPT) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    record(parser(__doc__, ROUNDS), main)
