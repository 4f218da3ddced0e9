"""One training step of a GPT under DDP: ours, torch's over gloo, and without communication.

    torchrun --nproc-per-node 2 -m bench.ddp_step --json bench/results/ddp_step.json

Ranks are pinned to a core each, and all take turns in short rounds, so that a slow phase of the
machine hits all of them. Alone means that rank 0 trains and the others sleep; apart, that every
rank trains for itself at the same time, which shows what sharing the machine costs: no way to train
together can take less. The time of a step is the slowest rank's.

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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from bench.pinned import pin
from ringdp.cli import gpt
from ringdp.transport.base import Link

SHAPE = gpt.Shape(context=512, width=432, heads=6, blocks=6)  # 13.8M parameters
ROWS, TOKENS = 1, 128
CAPS = (None, 0.5, 25)  # MiB of a bucket, over the slow link: ours, less, and torch's
LATENCY = 5e-5  # s, of the slow link
ROUNDS, STEPS = 12, 3  # a round is STEPS steps of each; the first one warms up


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
    wrapped: dict[str, nn.Module] = {
        "alone": copy.deepcopy(model),
        "apart": copy.deepcopy(model),
        "torch": nn.parallel.DistributedDataParallel(copy.deepcopy(model)),
        "ringdp": ringdp.DistributedDataParallel(copy.deepcopy(model)),
        "ringdp, 2 MiB": ringdp.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=2),
    }
    steps = {name: stepper(m, comm.rank) for name, m in wrapped.items()}
    if comm.rank:
        steps["alone"] = lambda: None
    times = interleaved(steps, arguments.rounds)
    results = {name: summary(seconds) for name, seconds in times.items()}
    parameters = elements(model)
    if comm.rank == 0:
        print(f"{parameters:,} parameters, batch {ROWS} x {TOKENS}, float32, AdamW")
        report(results)
    single = comm.split(comm.rank)
    overlap = overlapped(model, single, arguments.rounds)
    if comm.rank == 0:
        for row in overlap:
            print(", ".join(f"{name} {value}" for name, value in asdict(row).items()))
        if arguments.json:
            found = {"parameters": parameters, "ranks": comm.size, "step_ms": results}
            found["ratios"] = ratios(results)
            found["slow_link"] = [asdict(row) for row in overlap]
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


def interleaved(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step but the first round's, the slowest rank's."""
    times: dict[str, list[float]] = defaultdict(list)
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            for _ in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                step()
                if round_:
                    times[name].append(time.perf_counter() - start)
    return {name: slowest(seconds) for name, seconds in times.items()}


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


def longer(steps: list[float], others: list[float]) -> float:
    """The median difference between steps of the same round: the machine's phases last longer."""
    return statistics.median(a - b for a, b in zip(steps, others, strict=True))


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


def report(results: dict[str, dict[str, float]]) -> None:
    alone = results["alone"]
    print("                  min ms  median ms   max ms   x alone, min   x alone, median")
    for name, t in results.items():
        print(
            f"{name:<14} {t['min']:>9.1f} {t['median']:>10.1f} {t['max']:>8.1f} "
            f"{t['min'] / alone['min']:>14.2f} {t['median'] / alone['median']:>17.2f}"
        )
    for name, (ours, bound) in ratios(results).items():
        print(f"ringdp / {name}: {ours:.2f} at the median; without communication {bound:.2f}")


def ratios(results: dict[str, dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Medians over those of another way to train: ours, and without communication."""
    ours, bound = (results[name]["median"] for name in ("ringdp", "apart"))
    return {
        name: (round(ours / results[name]["median"], 3), round(bound / results[name]["median"], 3))
        for name in ("torch", "alone", "apart")
    }


if __name__ == "__main__":
    main()
