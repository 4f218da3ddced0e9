"""One training step of a GPT under DDP: ours, torch's over gloo, and without communication.

    torchrun --nproc-per-node 2 -m bench.ddp_step --json bench/results/ddp_step.json

Ranks are pinned to a core each, and all take turns (`bench.turns`). Alone means that rank 0 trains
and the others sleep; apart, that every rank trains for itself at the same time, which shows what
sharing the machine costs: no way to train together can take less. All use torch.optim.AdamW.

Then the ranks talk over an emulated link, so slow that all of the gradients' all_reduces, in our
buckets, take as long as backward computes:

    silent         forward and backward of DDP on every rank alone: all but communication
    together       the same of the ranks together
    communication  the same all_reduces, and nothing else
    exposed = together - silent, of the same round        hidden = communication - exposed

What the emulation takes of the cores that compute, additions included, is `copies`. It counts as
exposed in `hidden_share`, and not in `without_copies`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from bench.pinned import pin
from bench.turns import ROUNDS, interleaved, longer, ratio, spread
from ringdp.cli import gpt
from ringdp.transport.base import Link

SHAPE = gpt.Shape(context=512, width=432, heads=6, blocks=6)  # 13.8M parameters
ROWS, TOKENS = 1, 128
CAPS = (None, 0.5, 25)  # MiB of a bucket, over the slow link: ours, less, and torch's
LATENCY = 5e-5  # s, of the slow link


@dataclass(frozen=True)
class Step:
    """Milliseconds of one way to train, and how many times as long as another's it takes."""

    name: str
    min: float
    median: float
    max: float
    by_alone: float
    by_apart: float
    by_torch: float


@dataclass(frozen=True)
class Overlap:
    """What a slow link leaves to wait for. `bucket_mib`: of DDP's argument; None: the default."""

    bucket_mib: float | None
    mb_per_s: float
    ms: dict[str, float]  # medians
    hidden_share: float
    without_copies: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    comm = ringdp.init()
    pin(comm.rank)
    dist.init_process_group("gloo")
    model = gpt.build(SHAPE, seed=0)
    found = rows(interleaved(compared(model, comm.rank), arguments.rounds))
    overlap = overlapped(model, comm.split(comm.rank), arguments.rounds)
    if comm.rank == 0:
        print(f"{elements(model):,} parameters, batch {ROWS} x {TOKENS}, float32, AdamW; ms")
        for row in (*found, *overlap):
            print(json.dumps(asdict(row)))
        if arguments.json:
            values = {"parameters": elements(model), "ranks": comm.size}
            values |= {"steps": [asdict(row) for row in found]}
            values |= {"slow_link": [asdict(row) for row in overlap]}
            arguments.json.write_text(json.dumps(values, indent=1) + "\n")
    dist.destroy_process_group()


def compared(model: nn.Module, rank: int) -> dict[str, Callable[[], object]]:
    ways: dict[str, nn.Module] = {
        "alone": copy.deepcopy(model),
        "apart": copy.deepcopy(model),
        "torch": nn.parallel.DistributedDataParallel(copy.deepcopy(model)),
        "ringdp": ringdp.DistributedDataParallel(copy.deepcopy(model)),
        "ringdp, 2 MiB": ringdp.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=2),
    }
    steps = {name: stepper(net, rank) for name, net in ways.items()}
    if rank:
        steps["alone"] = lambda: None
    return steps


def rows(times: dict[str, list[float]]) -> list[Step]:
    return [
        Step(
            name,
            **spread(seconds, 1e3),
            by_alone=ratio(seconds, times["alone"]),
            by_apart=ratio(seconds, times["apart"]),
            by_torch=ratio(seconds, times["torch"]),
        )
        for name, seconds in times.items()
    ]


def overlapped(model: nn.Module, single: ringdp.Communicator, rounds: int) -> list[Overlap]:
    """One a bucket size."""
    tokens = batch(dist.get_rank())

    def forward(net: nn.Module) -> torch.Tensor:
        net.zero_grad()
        return gpt.next_byte_loss(net, tokens)

    def both(net: nn.Module) -> None:
        forward(net).backward()

    def over(group: ringdp.Communicator, cap: int | None) -> nn.Module:
        """Trained enough for its buckets to be in their final order."""
        net = ringdp.DistributedDataParallel(
            copy.deepcopy(model), process_group=group, bucket_cap_mb=cap
        )
        for _ in range(2):
            both(net)
        return net

    copies: list[float] = []  # s of CPU

    def communicate(net: nn.Module) -> None:
        start = time.process_time()
        for finish in [bucket.start() for bucket in net.reducer.buckets]:
            finish()
        copies.append(time.process_time() - start)

    local = copy.deepcopy(model)
    compute = interleaved({"forward": lambda: forward(local), "both": lambda: both(local)}, rounds)
    backward = statistics.median(compute["both"]) - statistics.median(compute["forward"])
    sent = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * 4 * elements(model)
    link = Link(LATENCY, sent / backward)
    net = over(ringdp.init(link=link), None)
    whole = statistics.median(interleaved({"": lambda: communicate(net)}, rounds)[""])
    link = Link(LATENCY, link.bandwidth * whole / backward)
    copies.clear()
    steps: dict[str, Callable[[], object]] = {"silent": partial(both, over(single, None))}
    for cap in CAPS:
        together = over(ringdp.init(link=link), cap)
        steps[f"communication {cap}"] = partial(communicate, together)
        steps[f"together {cap}"] = partial(both, together)
    times = interleaved(steps, rounds)
    found = []
    for cap in CAPS:
        ms = {
            name: 1e3 * statistics.median(times[f"{name} {cap}"])
            for name in ("communication", "together")
        }
        ms["silent"] = 1e3 * statistics.median(times["silent"])
        exposed = 1e3 * longer(times[f"together {cap}"], times["silent"])
        hidden = ms["communication"] - exposed
        ms |= {"backward": 1e3 * backward, "copies": 1e3 * statistics.median(copies)}
        ms |= {"exposed": exposed, "hidden": hidden}
        found.append(
            Overlap(
                bucket_mib=cap,
                mb_per_s=round(link.bandwidth / 1e6, 1),
                ms={name: round(value, 1) for name, value in ms.items()},
                hidden_share=round(hidden / ms["communication"], 3),
                without_copies=round((hidden + ms["copies"]) / ms["communication"], 3),
            )
        )
    return found


def elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def batch(rank: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(rank)
    return torch.randint(gpt.VOCABULARY, (ROWS, TOKENS + 1), generator=seed)


def stepper(model: nn.Module, rank: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = batch(rank)

    def step() -> None:
        optimizer.zero_grad()
        gpt.next_byte_loss(model, tokens).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
