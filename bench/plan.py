"""Compares the predictions of `ringdp plan` with runs on 2 to 8 ranks of this machine.

    python -m bench.plan --json bench/results/plan.json

First every collective is timed as the engine issues it, in registered buffers and in the
background. α β γ and the bus are fitted to every second size; the other sizes are predicted. Then a
GPT is trained in every stage, over shared memory and over an emulated link whose α and β are known.
Ranks that each train a copy, without communication, measure two rates of the device: flop/s of a
forward and backward, and bytes/s of the optimizer. Bytes held and sent must equal the predictions;
for times the differences are printed. A time runs from the last rank's begin to the last rank's
end.
"""

from __future__ import annotations

import copy
import statistics
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

import ringdp
from bench import jobs
from bench.ddp_step import batch
from bench.results import parser, positive, record
from bench.turns import ms, timed
from ringdp.cli import gpt
from ringdp.cli.bench.kernel_cases import CASES
from ringdp.cli.plan.hardware import Network
from ringdp.cli.plan.models import of_module
from ringdp.cli.plan.stages import FLOPS, Setting, row
from ringdp.cli.plan.table import terms
from ringdp.parallel.stages import STAGES
from ringdp.schedule import Collective
from ringdp.schedule.cost import Machine, closed, fit, seconds

RANKS = (2, 4, 8)
LINK = ringdp.Link(latency=1e-3, bandwidth=4e8)  # s, bytes/s
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = tuple(1 << k for k in range(16, 25))  # bytes; the fit uses every second one
SHAPE = gpt.Shape(context=128, width=256, heads=4, blocks=6)
ROWS = 1
Key = tuple[int, Collective, int]  # ranks, collective, bytes
CALLS, STEPS = 9, 5


@dataclass(frozen=True)
class Timed:
    """Times of a collective in ms. `fitted`: whether the fit used this size."""

    ranks: int
    collective: str
    bytes: int
    fitted: bool
    predicted: float
    min: float
    median: float
    max: float


@dataclass(frozen=True)
class Run:
    """Bytes of rank 0, and times of a step in ms.

    `exposed` is the measured step without the predicted compute and optimizer.
    """

    ranks: int
    network: str
    stage: int
    held: list[int]
    held_predicted: list[int]
    sent: int
    sent_predicted: int
    predicted: float
    min: float
    median: float
    max: float
    exposed_predicted: float
    exposed: float


class Rates(NamedTuple):
    """Seconds of a whole model's forward and backward, and of an optimizer step."""

    compute: float
    optimizer: float


def options() -> ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--ranks", type=positive, nargs="+", default=RANKS)
    return made


def main(ranks: Sequence[int]) -> dict[str, object]:
    times = {key: t for n in ranks for key, t in jobs.run(n, timed_collectives).items()}
    seen = [key for key in times if SIZES.index(key[2]) % 2 == 0]
    host = {name: fitted({k: times[k] for k in seen if k[1] == name}) for name in COLLECTIVES}
    collectives = [
        Timed(*key, key in seen, *ms(predicted(host[key[1]], *key), times[key])) for key in times
    ]
    runs = [run for n in ranks for run in jobs.run(n, trained, host)]
    show(host, collectives, runs)
    return {
        "fitted": {name: m._asdict() for name, m in host.items()},
        "link": LINK._asdict(),
        "collectives": collectives,
        "runs": runs,
    }


def fitted(times: dict[Key, list[float]]) -> Machine:
    return fit((closed(c, "direct", n), s, statistics.median(t)) for (n, c, s), t in times.items())


def predicted(machine: Machine, n: int, collective: Collective, size: int) -> float:
    return seconds(closed(collective, "direct", n), machine, size)


# ---- on every rank


def timed_collectives() -> dict[Key, list[float]]:
    """The seconds of every call."""
    clock = ringdp.init()
    comm, found = clock.duplicate(), {}
    for size in SIZES:
        whole = comm.empty(size // 4)
        whole.zero_()
        part = whole[: size // 4 // comm.size * comm.size].chunk(comm.size)[comm.rank]
        calls: dict[str, Callable[[], ringdp.Work]] = {
            "all_reduce": lambda b=whole: comm.all_reduce(b, async_op=True),
            "reduce_scatter": lambda b=whole, p=part: comm.reduce_scatter(p, b, async_op=True),
            "all_gather": lambda b=whole, p=part: comm.all_gather(b, p, async_op=True),
        }
        for name in COLLECTIVES:
            found[comm.size, name, size] = timed(clock, lambda c=calls[name]: c().wait(), CALLS)
    return found


def trained(host: dict[str, Machine]) -> list[Run]:
    """A run for each network and stage, with rates measured once."""
    clock = ringdp.init()
    model = gpt.build(SHAPE, seed=0)
    rates = measured_rates(clock, model)
    shared = Network(host["all_reduce"], "shared memory", cores=2, fitted=host, yields=True)
    linked = Network(Machine(LINK.latency, 1 / LINK.bandwidth, 0), "link")
    return [
        one(clock, model, comm, stage.number, rates, network)
        for comm, network in ((ringdp.init(), shared), (ringdp.init(link=LINK), linked))
        for stage in STAGES
    ]


def measured_rates(clock: ringdp.Communicator, model: nn.Module) -> Rates:
    """Measure the rates on all ranks at once, each with its own copy of the model."""
    net = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(net.parameters())
    both = timed(clock, lambda: forward_backward(net, clock.rank), STEPS)
    step = timed(clock, optimizer.step, STEPS)
    return Rates(statistics.median(both), statistics.median(step))


def forward_backward(net: nn.Module, rank: int) -> None:
    net.zero_grad()
    gpt.next_byte_loss(net, batch(rank, ROWS, SHAPE.context)).backward()


def one(
    clock: ringdp.Communicator,
    model: nn.Module,
    comm: ringdp.Communicator,
    stage: int,
    rates: Rates,
    network: Network,
) -> Run:
    plan = of_module("gpt", model, ringdp.Precision())
    tokens = ROWS * SHAPE.context
    setting = Setting(
        ranks=comm.size,
        tokens=tokens,
        memory=1 << 30,
        flops=3 * FLOPS * plan.elements * tokens / rates.compute,
        bandwidth=4 * CASES["adamw"].moves * plan.elements / rates.optimizer,
        network=network,
        within=network,
    )
    says = row(plan, stage, setting)
    net = copy.deepcopy(model)
    engine = ringdp.shard(net, stage=stage, comm=comm)
    optimizer = torch.optim.AdamW(net.parameters())
    sent = []

    def step() -> None:
        before = engine.sent_bytes()
        forward_backward(net, comm.rank)
        optimizer.step()
        sent.append(engine.sent_bytes() - before)

    times = timed(clock, step, STEPS)
    held = engine.memory(optimizer)
    engine.close()
    took = ms(says.step.total, times)
    inside = 1e3 * (says.step.compute + says.step.optimizer)
    return Run(
        comm.size,
        network.source,
        stage,
        list(held),
        list(says.memory),
        sent[-1],
        says.sent,
        *took,
        exposed_predicted=round(1e3 * says.step.exposed, 3),
        exposed=round(took[2] - inside, 3),
    )


def show(host: dict[str, Machine], collectives: list[Timed], runs: list[Run]) -> None:
    for name, machine in host.items():
        print(f"{name}: {terms(machine)}")
    for c in collectives:
        print(
            f"{c.ranks} ranks {c.collective:<14} {c.bytes:>10,} bytes "
            f"{'fitted' if c.fitted else '      '} predicted {c.predicted:8.3f} ms, measured "
            f"{c.min:8.3f} {c.median:8.3f} {c.max:8.3f}, {c.predicted / c.median - 1:+.0%}"
        )
    for r in runs:
        exact = r.held == r.held_predicted and r.sent == r.sent_predicted
        print(
            f"{r.ranks} ranks {r.network:<13} stage {r.stage} bytes "
            f"{'equal' if exact else 'DIFFER'}; step predicted {r.predicted:7.1f} ms, measured "
            f"{r.min:7.1f} {r.median:7.1f} {r.max:7.1f}, {r.predicted / r.median - 1:+.0%}; "
            f"exposed {r.exposed_predicted:6.1f}, measured {r.exposed:6.1f}"
        )


if __name__ == "__main__":
    record(options(), main)
