"""Times a training step of a GPT under ZeRO-1, 2, 3: ringdp's, FSDP2 over gloo, and one process.

    python -m bench.zero_step --json bench/results/zero_step.json

As in `bench.ddp_step`, each way is a job of its own on pinned ranks, and the jobs take turns.
`apart` is every rank by itself at the same time. All use torch.optim.AdamW.

Then the ranks communicate over an emulated link, which is so slow that all gathers and reductions
of a stage 3 step take as long as its forward and backward:

    silent         forward and backward of stage 3 on every rank alone, without communication
    together       the same with all ranks together
    communication  the same gathers and reductions one after the other, and nothing else
    edges          the part that cannot be hidden: the first two gathers (of the root and the first
                   block), before any compute, and the root's reduction, after all compute
    exposed = together - silent, of the same round        hidden = communication - exposed
    hidden share = hidden / (communication - edges)
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from bench import jobs
from bench.ddp_step import KEPT, RANKS, SHAPE, batch, median_ms, report, slow, timed
from bench.results import parser, record
from bench.torch_backend import fsdp2
from bench.turns import ROUNDS, interleaved, longer
from ringdp.cli import gpt
from ringdp.parallel.accounting.dry_run import iteration
from ringdp.tape import recorder

FSDP2 = "FSDP2, gloo"
WAYS = ("alone", "apart", FSDP2, f"{FSDP2}{KEPT}", "stage 1", "stage 2", "stage 3")
AHEAD = (1, 3)  # blocks gathered ahead of their use


def main(rounds: int) -> dict[str, object]:
    overlaps, spans = jobs.run(RANKS, overlapped, rounds)
    return report(timed(WAYS, FSDP2, wrapped, rounds), overlaps) | {"spans": spans}


def wrapped(way: str, model: gpt.GPT) -> nn.Module:
    if way.startswith(FSDP2):
        fsdp2(model)
    elif way.startswith("stage"):
        ringdp.init()
        ringdp.shard(model, stage=int(way[-1]), unit=gpt.Block)
    return model


# ---- over a slow link


class Span(NamedTuple):
    """Something that lasted from `begin` to `end`, in ms."""

    lane: str
    label: str
    begin: float
    end: float


def apart(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over rows without overlap: each goes to the first row that is free."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.begin):
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


@dataclass(frozen=True)
class Overlap:
    """How much a step waits for a slow link: medians in ms.

    `ahead` is the number of blocks that may be gathered before their use; one is the default.
    """

    ahead: int
    mb_per_s: float
    silent: float
    together: float
    communication: float
    edges: float
    exposed: float

    @property
    def hidden(self) -> float:
        return self.communication - self.exposed

    @property
    def hidden_share(self) -> float:
        return self.hidden / (self.communication - self.edges)


def overlapped(rounds: int) -> tuple[list[Overlap], list[Span]]:
    """Measure the overlap for each of AHEAD, and record one step's spans with the last."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    single = ringdp.init().split(rank)
    model, tokens = gpt.build(SHAPE, seed=0), batch(rank)
    block = 4 * max(map(gpt.elements, model.blocks))

    def both(net: nn.Module) -> None:
        net.zero_grad()
        gpt.next_byte_loss(net, tokens).backward()

    def over(comm: ringdp.Communicator, ahead: int) -> tuple[nn.Module, ringdp.Engine]:
        net = copy.deepcopy(model)
        limit = ahead * (block + 4096)  # bytes, padding included
        engine = ringdp.shard(net, stage=3, unit=gpt.Block, prefetch_bytes=limit, comm=comm)
        both(net)
        return net, engine

    silent, _ = over(single, 1)
    compute = interleaved({"silent": lambda: both(silent)}, "without a link", rounds)["silent"]
    ranks = dist.get_world_size()
    sent = 3 * 4 * gpt.elements(model) * (ranks - 1) / ranks
    link = slow(
        sent,
        statistics.median(compute),
        lambda comm: partial(communicate, over(comm, 1)[1]),
        rounds,
    )
    comm = ringdp.init(link=link)
    trained = {ahead: over(comm, ahead) for ahead in AHEAD}
    _, engine = trained[AHEAD[0]]
    times = interleaved(
        {"edges": lambda: edges(engine), "silent": lambda: both(silent)}
        | {f"{ahead}": lambda net=net: both(net) for ahead, (net, _) in trained.items()}
        | {f"sent {ahead}": lambda e=e: communicate(e) for ahead, (_, e) in trained.items()},
        "over the link",
        rounds,
    )
    found = [
        Overlap(
            ahead=ahead,
            mb_per_s=round(link.bandwidth / 1e6, 1),
            silent=median_ms(times["silent"]),
            together=median_ms(times[f"{ahead}"]),
            communication=median_ms(times[f"sent {ahead}"]),
            edges=median_ms(times["edges"]),
            exposed=round(1e3 * longer(times[f"{ahead}"], times["silent"]), 1),
        )
        for ahead in AHEAD
    ]
    net, _ = trained[AHEAD[-1]]
    return found, recorded(lambda: both(net))


def gather(engine: ringdp.Engine, unit: Any) -> None:
    full = torch.empty(unit.plan.padded)
    engine.gathering.comm.all_gather(full, unit.shard, async_op=True).wait()


def reduce(engine: ringdp.Engine, unit: Any) -> None:
    bucket = engine.comm.empty(unit.plan.padded)
    engine.reducing.comm.reduce_scatter(bucket[unit.cut.part], bucket, async_op=True).wait()


def communicate(engine: ringdp.Engine) -> None:
    sizes, limit = [unit.bytes for unit in engine.units], engine.gathering.limit
    for event in iteration(sizes, engine.groups, limit, freed=True):
        if event.what == "gather":
            gather(engine, engine.units[event.which])
    for unit in engine.units:
        reduce(engine, unit)


def edges(engine: ringdp.Engine) -> None:
    gather(engine, engine.units[0])
    gather(engine, engine.units[1])
    reduce(engine, engine.units[0])


def recorded(step: Callable[[], None]) -> list[Span]:
    """The spans of one step, in ms from its begin; a label is the unit's index.

    A collective lasts from when it is issued until it has been waited for; or until it is over, if
    no wait found it under way.
    """
    tape, start = recorder.start(), time.monotonic_ns()
    step()
    recorder.stop()
    units = {u["name"]: str(i) for i, u in enumerate(tape.facts["engines"][0]["units"])}
    of = defaultdict[str, list[recorder.Span]](list)
    for span in tape.spans:
        of[span.category].append(span)
    waited = {_call(s): s.end for s in of["wait"]}
    tags = {_call(s): str(s.args["tag"]) for s in of["collective"]}
    spans = [
        Span(kind, units[name], s.begin, s.end)
        for kind in ("forward", "backward")
        for s in of[kind]
        if (name := s.name.removeprefix(f"{kind} ")) != "root"
    ]
    spans += [Span("wait", tags[_call(s)], s.begin, s.end) for s in of["wait"]]
    for s in of["collective"]:
        issued = s.begin - 1e3 * s.args["queued_us"]
        spans.append(
            Span(s.args["collective"], tags[_call(s)], issued, waited.get(_call(s), s.end))
        )
    ms = [[round((t - start) / 1e6, 3) for t in (s.begin, s.end)] for s in spans]
    return [s._replace(begin=b, end=e) for s, (b, e) in zip(spans, ms, strict=True)]


def _call(span: recorder.Span) -> tuple[str, int]:
    """The collective that a span is of: communicator and number."""
    return span.args["comm"], span.args["number"]


if __name__ == "__main__":
    record(parser(__doc__, ROUNDS), main)
