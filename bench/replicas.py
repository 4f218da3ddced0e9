"""Times a training step on two hosts with a slow network between them, by what crosses it.

    python -m bench.replicas --json bench/results/replicas.json

The hosts are those of `bench.hosts`, with RANKS ranks each, and RATE both ways between them. All
train the GPT of `bench.ddp_step` with AdamW, and gather and free a block at a time: ringdp's stage
3 over gloo, and torch's FSDP2 over gloo, each with all ranks holding one model, with backward's
gathers within a host (from pieces that its ranks keep), and with a replica on each host. A host's
ranks share memory in ringdp. The ways take turns in one job, which keeps freed memory. `mb` is what
a host sends in a step, as its end of the cable counts it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringdp
from bench.ddp_step import SHAPE, batch, stepper
from bench.hosts import HOSTS, finish, torchrun, two_hosts
from bench.results import parser
from bench.turns import interleaved, rows
from ringdp.cli import gpt
from ringdp.cli.bench.machine import describe
from ringdp.cli.files import write_json

RANKS, RATE, ROUNDS, LONGEST = 2, "1 Gbit", 12, 1800.0  # of a host; s that all may take
FSDP2 = "FSDP2 over gloo"
PIECES, REPLICAS = ", a unit's pieces on each host", ", a replica on each host"
WAYS = [f"{name}{how}" for name in ("stage 3", FSDP2) for how in ("", PIECES, REPLICAS)]


def main() -> None:
    arguments, machine = parser(__doc__, ROUNDS).parse_args(), describe(RANKS * len(HOSTS))
    if "RANK" in os.environ:
        write_json(arguments.json if os.environ["RANK"] == "0" else None, train(arguments.rounds))
        return
    with tempfile.TemporaryDirectory() as at, two_hosts(RATE.replace(" ", "").lower()) as hosts:
        path = Path(at) / "found.json"
        asked = ["-m", "bench.replicas", "--rounds", f"{arguments.rounds}", "--json", f"{path}"]
        nodes = [torchrun(host, RANKS, asked, Path(at)) for host in hosts]
        if finish(nodes, LONGEST) or not path.exists():
            sys.exit("the ranks have not ended, or failed")
        found = json.loads(path.read_bytes())
    write_json(arguments.json, {"machine": machine, "rate": RATE} | found)


def train(rounds: int) -> dict[str, object]:
    """On every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ringdp.init(transport="c10d")
    rank = dist.get_rank()
    steps, sent = {}, dict[str, list[int]]()
    for way in WAYS:
        step = stepper(sharded(way, gpt.build(SHAPE, seed=0)), batch(rank))
        steps[way] = counting(step, sent.setdefault(way, []))
    times = interleaved(steps, "two hosts", rounds)
    found = [
        asdict(row) | {"mb": round(statistics.median(sent[row.name]) / 1e6, 1)}
        for row in rows(
            times, fsdp2=FSDP2, pieces=f"{FSDP2}{PIECES}", replicas=f"{FSDP2}{REPLICAS}"
        )
    ]
    if rank == 0:
        for row in found:
            print(row)
    return {"parameters": gpt.elements(gpt.build(SHAPE, seed=0)), "steps": found}


def sharded(way: str, model: gpt.GPT) -> nn.Module:
    world, replicas, pieces = dist.get_world_size(), REPLICAS in way, PIECES in way
    if way.startswith("stage 3"):
        ringdp.shard(
            model,
            stage=3,
            unit=gpt.Block,
            shard_size=RANKS if replicas else None,
            reshard_size=RANKS if pieces else None,
        )
        return model
    shape = {"replicas": world // RANKS, "shards": RANKS} if replicas else {"shards": world}
    mesh = init_device_mesh("cpu", (*shape.values(),), mesh_dim_names=(*shape,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=RANKS if pieces else True)
    return fully_shard(model, mesh=mesh)


def counting(step: Callable[[], None], sent: list[int]) -> Callable[[], None]:
    """The step, whose bytes on the cable are added to `sent`. Only so many of the other host's
    acknowledgements are among them as belong to one step."""
    cable = os.environ["GLOO_SOCKET_IFNAME"]
    count = Path(f"/sys/class/net/{cable}/statistics/tx_bytes")

    def counted() -> None:
        before = int(count.read_text(encoding="ascii"))
        step()
        dist.barrier()
        sent.append(int(count.read_text(encoding="ascii")) - before)

    return counted


if __name__ == "__main__":
    main()
