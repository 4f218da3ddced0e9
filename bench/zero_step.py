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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from bench import jobs
from bench.ddp_step import KEPT, RANKS, SHAPE, batch, median_ms, report, slow, train
from bench.results import parser
from bench.torch_backend import fsdp2
from bench.turns import ROUNDS, between_jobs, interleaved, longer, rows
from ringdp.cli import gpt
from ringdp.cli.files import write_json
from ringdp.parallel.dry_run import iteration

FSDP2 = "FSDP2, gloo"
WAYS = ("alone", "apart", FSDP2, f"{FSDP2}{KEPT}", "stage 1", "stage 2", "stage 3")
AHEAD = (1, 3)  # blocks gathered ahead of their use


def main() -> None:
    arguments = parser(__doc__, ROUNDS).parse_args()
    overlaps, spans = jobs.run(RANKS, overlapped, arguments.rounds)
    ways = {way: partial(train, way, FSDP2, wrapped) for way in WAYS}
    times = between_jobs(RANKS, ways, arguments.rounds)
    steps = rows(times, alone="alone", peer=FSDP2, kept=f"{FSDP2}{KEPT}")
    write_json(arguments.json, report(steps, overlaps) | {"spans": spans})


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


class Recorder:
    """Wraps a communicator. For each collective it records the span from issue to the end of the
    wait, and the wait itself."""

    def __init__(self, comm: ringdp.Communicator, spans: list[Span]) -> None:
        self.comm, self.spans, self.size = comm, spans, comm.size

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, tag: int, async_op: bool) -> Any:
            issued = time.perf_counter()
            work = getattr(self.comm, name)(*args, tag=tag, async_op=async_op)
            return _Waited(work, self.spans, name, tag, issued)

        return call


class _Waited:
    def __init__(self, work: Any, spans: list[Span], name: str, tag: int, issued: float) -> None:
        self.work, self.spans, self.name, self.tag, self.issued = work, spans, name, tag, issued

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        begin = time.perf_counter()
        self.work.wait()
        end = time.perf_counter()
        self.spans.append(Span(self.name, str(self.tag), self.issued, end))
        self.spans.append(Span("wait", str(self.tag), begin, end))


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
        {
            "edges": lambda: edges(engine),
            "silent": lambda: both(silent),
        }
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
    net, engine = trained[AHEAD[-1]]
    return found, recorded(net, engine, lambda: both(net))


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


def recorded(net: Any, engine: Any, step: Callable[[], None]) -> list[Span]:
    """The spans of one step, in ms from its begin."""
    spans: list[Span] = []
    began: dict[tuple[str, int], float] = {}
    gathering, reducing = engine.gathering, engine.reducing
    comms = gathering.comm, reducing.comm
    gathering.comm, reducing.comm = (Recorder(c, spans) for c in comms)

    def begin(kind: str, index: int) -> None:
        began[kind, index] = time.perf_counter()

    def end(kind: str, index: int) -> None:
        spans.append(Span(kind, str(index), began[kind, index], time.perf_counter()))

    handles = []
    for i, block in enumerate(net.blocks, start=1):
        handles += [
            block.register_forward_pre_hook(lambda *_, i=i: begin("forward", i)),
            block.register_forward_hook(lambda *_, i=i: end("forward", i)),
            block.register_full_backward_pre_hook(lambda *_, i=i: begin("backward", i)),
            block.register_full_backward_hook(lambda *_, i=i: end("backward", i)),
        ]
    start = time.perf_counter()
    step()
    for handle in handles:
        handle.remove()
    gathering.comm, reducing.comm = comms
    ms = [[round(1e3 * (t - start), 3) for t in (s.begin, s.end)] for s in spans]
    return [s._replace(begin=b, end=e) for s, (b, e) in zip(spans, ms, strict=True)]


if __name__ == "__main__":
    main()
