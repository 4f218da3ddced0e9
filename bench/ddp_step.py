"""Times a training step of a GPT under DDP: ringdp's, torch's over gloo, and without communication.

    python -m bench.ddp_step --json bench/results/ddp_step.json

Each rank is pinned to a core. Each way is a job of its own, and the jobs take turns
(`bench.turns`). `alone`: rank 0 trains and the others sleep. `apart`: all ranks train at the same
time, each by itself, which shows the cost of sharing the machine. All use torch.optim.AdamW. All
but `torch` keep freed memory, as ranks of ringdp always do (`ringdp.transport.heap`).

Then the ranks communicate over an emulated link, which is so slow that the all_reduces of all
gradients, in ringdp's buckets, take as long as backward computes:

    silent         forward and backward of DDP on every rank alone, without communication
    together       the same with all ranks together
    communication  the same all_reduces, and nothing else
    exposed = together - silent, of the same round        hidden = communication - exposed

`copies` is the CPU time that the emulation takes from the cores that compute, additions included.
It counts as exposed in `hidden_share`, but not in `without_copies`. Of several starts, the one with
the median hidden share is shown.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import ringdp
from bench import jobs
from bench.results import parser, record
from bench.turns import ROUNDS, STARTS, Row, between_jobs, interleaved, longer, rows
from ringdp.cli import gpt
from ringdp.transport import heap
from ringdp.transport.base import Link

RANKS, KEPT = 2, ", freed memory kept"
WAYS = ("alone", "apart", "torch", f"torch{KEPT}", "ringdp", "ringdp, 2 MiB")
SHAPE = gpt.Shape(context=512, width=432, heads=6, blocks=6)  # 13.8M parameters
ROWS, TOKENS = 1, 128
CAPS = (None, 0.5, 25)  # MiB per bucket over the slow link: ringdp's default, smaller, and torch's
LATENCY = 5e-5  # s, of the slow link
Wrapped = Callable[[str, gpt.GPT], nn.Module]  # (way, model) -> the model as that way trains it
Optimizers = Callable[[nn.Module], list[Optimizer]]


@dataclass(frozen=True)
class Overlap:
    """How much a step waits for a slow link: medians in ms.

    `bucket_mib` is DDP's argument; None means the default.
    """

    bucket_mib: float | None
    mb_per_s: float
    communication: float
    together: float
    silent: float
    backward: float
    copies: float
    exposed: float

    @property
    def hidden_share(self) -> float:
        return 1 - self.exposed / self.communication

    @property
    def without_copies(self) -> float:
        return self.hidden_share + self.copies / self.communication


def main(rounds: int) -> dict[str, object]:
    steps = timed(WAYS, "torch", wrapped, rounds, apart="apart")
    links = [jobs.run(RANKS, overlapped, -(-rounds // 3)) for _ in range(STARTS)]
    return report(steps, [typical(found) for found in zip(*links, strict=True)])


def report(
    steps: Sequence[Row], overlaps: Sequence[Any], optimizer: str = "AdamW"
) -> dict[str, object]:
    """Print the results; return what is written to the file."""
    parameters = gpt.elements(gpt.build(SHAPE, seed=0))
    print(f"{parameters:,} parameters, {RANKS} ranks, float32, {optimizer}; ms")
    for row in steps:
        print(row)
    for overlap in overlaps:
        print(f"{overlap.hidden_share:.1%} hidden: {overlap}")
    return {"parameters": parameters, "ranks": RANKS, "steps": steps, "slow_link": overlaps}


def adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-4)]


def timed(
    names: Iterable[str],
    peer: str,
    wrapped: Wrapped,
    rounds: int,
    optimizers: Optimizers = adamw,
    **by: str,
) -> list[Row]:
    """The ways' steps, beside those of one process alone, of the peer, and of the ways in `by`."""
    ways = {way: partial(train, way, peer, wrapped, optimizers) for way in names}
    times = between_jobs(RANKS, ways, rounds)
    return rows(times, alone="alone", peer=peer, kept=f"{peer}{KEPT}", **by)


def train(way: str, peer: str, wrapped: Wrapped, optimizers: Optimizers) -> Callable[[], object]:
    """Make one way's step on this rank. All ways but `peer` keep freed memory."""
    dist.init_process_group("gloo")
    model = gpt.build(SHAPE, seed=0)
    rank = dist.get_rank()
    if way == "alone" and rank:
        return lambda: None
    if way != peer:
        heap.keep()
    return stepper(wrapped(way, model), batch(rank), optimizers)


def wrapped(way: str, model: gpt.GPT) -> nn.Module:
    if way.startswith("torch"):
        return nn.parallel.DistributedDataParallel(model)
    if way.startswith("ringdp"):
        return ringdp.DistributedDataParallel(model, bucket_cap_mb=2 if way != "ringdp" else None)
    return model


def overlapped(rounds: int) -> list[Overlap]:
    """Measure the overlap for each bucket size."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    single = ringdp.init().split(rank)
    model, tokens = gpt.build(SHAPE, seed=0), batch(rank)

    def forward(net: nn.Module) -> torch.Tensor:
        net.zero_grad()
        return gpt.next_byte_loss(net, tokens)

    def both(net: nn.Module) -> None:
        forward(net).backward()

    def over(group: ringdp.Communicator, cap: int | None) -> nn.Module:
        """Train until the buckets are in their final order."""
        net = ringdp.DistributedDataParallel(
            copy.deepcopy(model), process_group=group, bucket_cap_mb=cap
        )
        for _ in range(2):
            both(net)
        return net

    def communicate(net: nn.Module, copies: list[float]) -> None:
        """Reduce all buckets; append the CPU seconds to `copies`."""
        start = time.process_time()
        for finish in [bucket.start() for bucket in net.reducer.buckets]:
            finish()
        copies.append(time.process_time() - start)

    local = copy.deepcopy(model)
    alone = {"forward": lambda: forward(local), "both": lambda: both(local)}
    compute = interleaved(alone, "without a link", rounds)
    backward = statistics.median(compute["both"]) - statistics.median(compute["forward"])
    sent = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * 4 * gpt.elements(model)
    link = slow(sent, backward, lambda comm: partial(communicate, over(comm, None), []), rounds)
    steps: dict[str, Callable[[], object]] = {"silent": partial(both, over(single, None))}
    copies: dict[float | None, list[float]] = {cap: [] for cap in CAPS}
    for cap in CAPS:
        together = over(ringdp.init(link=link), cap)
        steps[f"communication {cap}"] = partial(communicate, together, copies[cap])
        steps[f"together {cap}"] = partial(both, together)
    times = interleaved(steps, "over the link", rounds)
    return [
        Overlap(
            bucket_mib=cap,
            mb_per_s=round(link.bandwidth / 1e6, 1),
            communication=median_ms(times[f"communication {cap}"]),
            together=median_ms(times[f"together {cap}"]),
            silent=median_ms(times["silent"]),
            backward=round(1e3 * backward, 1),
            copies=median_ms(copies[cap]),
            exposed=round(1e3 * longer(times[f"together {cap}"], times["silent"]), 1),
        )
        for cap in CAPS
    ]


def median_ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 1)


def slow(
    sent: float,
    seconds: float,
    communicate: Callable[[ringdp.Communicator], Callable[[], object]],
    rounds: int,
) -> Link:
    """A link over which communication takes about `seconds`. `sent` is a rough count of bytes."""
    link = Link(LATENCY, sent / seconds)
    ways = {"": communicate(ringdp.init(link=link))}
    (took,) = interleaved(ways, "over a link to try", rounds).values()
    # Emulation takes time of its own; a faster link compensates.
    return Link(LATENCY, link.bandwidth * statistics.median(took) / seconds)


def typical(starts: Sequence[Overlap]) -> Overlap:
    """The start with the median hidden share, or the worse of two."""
    return sorted(starts, key=lambda start: start.hidden_share)[(len(starts) - 1) // 2]


def batch(rank: int, rows: int = ROWS, tokens: int = TOKENS) -> torch.Tensor:
    seed = torch.Generator().manual_seed(rank)
    return torch.randint(gpt.VOCABULARY, (rows, tokens + 1), generator=seed)


def stepper(
    model: nn.Module,
    tokens: torch.Tensor,
    optimizers: Optimizers = adamw,
) -> Callable[[], None]:
    made = optimizers(model)

    def step() -> None:
        model.zero_grad()
        gpt.next_byte_loss(model, tokens).backward()
        for optimizer in made:
            optimizer.step()

    return step


if __name__ == "__main__":
    record(parser(__doc__, ROUNDS), main)
