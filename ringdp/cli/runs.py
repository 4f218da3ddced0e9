"""The runs that `ringdp train` compares: one training loop, and what each run measures.

The loop serves the single process, every rank of every stage, and every mode. Whatever differs
between them is passed in: which rows to learn, and how to average a loss.
"""

import hashlib
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

import ringdp
from ringdp.cli import gpt, gpus, text
from ringdp.cli.options import Options
from ringdp.comm.rendezvous import TransportName
from ringdp.parallel.accounting.memory import Memory

MEMORY = Memory._fields
REPORT_EVERY = 0.2  # s
PROMPT = b"def "
SAMPLE_BYTES = 120


@dataclass(frozen=True)
class Record:
    """A run: of one stage on one rank, or (stage None) of the single process.

    Bytes are per rank. `memory` and `memory_formula` both have the keys of MEMORY.
    """

    parameters: int  # elements of the whole model
    loss: tuple[float, ...]  # mean over the global batch, one per step
    seconds: tuple[float, ...]  # one per step, including the first
    tokens_per_step: int  # of the global batch
    digest: str  # of the bits of all final parameters
    stage: int | None = None
    ranks: int = 1
    memory: dict[str, int] = field(default_factory=dict)
    memory_formula: dict[str, int] = field(default_factory=dict)
    sent: int = 0  # bytes per step
    sent_formula: int = 0
    sample: bytes = b""  # what the trained model writes; only the last stage's is shown

    def milliseconds(self, percentile: float) -> float:
        return float(np.percentile(self.seconds, percentile)) * 1e3

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / (self.milliseconds(50) / 1e3)


def to_json(record: Record) -> dict[str, Any]:
    return {
        "stage": record.stage,
        "ranks": record.ranks,
        "parameters": record.parameters,
        "loss": list(record.loss),
        "step_ms": {f"p{p}": round(record.milliseconds(p), 3) for p in (20, 50, 80)},
        "tokens_per_s": round(record.tokens_per_second, 1),
        "memory": {**record.memory, "formula": record.memory_formula},
        "traffic": {"sent_bytes_per_step": record.sent, "formula": record.sent_formula},
    }


class Optimizer(Protocol):
    """The part of an optimizer that the loop uses."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


class Progress(NamedTuple):
    """How far a run is."""

    run: str
    step: int  # finished steps
    steps: int
    loss: float
    tokens_per_second: float
    memory: dict[str, int]  # bytes on this rank by category; empty for the single process


Emit = Callable[[Progress], None]


class Trained(NamedTuple):
    """One entry per step."""

    loss: tuple[float, ...]  # before the update
    seconds: tuple[float, ...]
    sent: tuple[int, ...]  # bytes


def train(
    run: str,
    model: nn.Module,
    optimizer: Optimizer,
    data: bytes,
    options: Options,
    emit: Emit | None,
    *,
    rows: slice = slice(None),
    mean: Callable[[Tensor], Tensor] = lambda loss: loss,
    memory: Callable[[], dict[str, int]] = dict,
    sent: Callable[[], int] = lambda: 0,
) -> Trained:
    """Train for `options.steps` steps on `rows` of each global batch.

    `emit` gets progress after the first step, the last, and every REPORT_EVERY seconds. `sent` is a
    counter of all bytes sent so far.
    """
    device = next(model.parameters()).device
    losses, seconds, totals, due = list[float](), list[float](), [sent()], 0.0
    for index in range(options.steps):
        start = time.perf_counter()
        tokens = text.batch(data, options.seed, index, options.global_batch, options.context)
        optimizer.zero_grad()
        loss = gpt.next_byte_loss(model, torch.from_numpy(tokens[rows]).to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(mean(loss.detach()).item())
        seconds.append(time.perf_counter() - start)
        totals.append(sent())
        done = index + 1
        if emit and (time.monotonic() >= due or done == options.steps):
            due = time.monotonic() + REPORT_EVERY
            speed = options.global_batch * options.context * done / sum(seconds)
            emit(Progress(run, done, options.steps, losses[-1], speed, memory()))
    each = tuple(after - before for before, after in pairwise(totals))
    return Trained(tuple(losses), tuple(seconds), each)


def parameter_digest(model: nn.Module) -> str:
    """SHA-256 of the bits of all parameters, in order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Job:
    """What every rank is given.

    The text is not part of it. Each rank reads the text itself, so that all ranks start at once:
    megabytes through a pipe would start them one after another. All read what the launcher has
    read: files may change meanwhile, as one with this command's output does.
    """

    options: Options
    text: Path  # see Text.shared
    mode: str = ""  # empty: all stages


def run_single(options: Options, data: bytes, emit: Emit) -> Record:
    """The reference: the same model and batches in this process.

    It uses one thread, as each rank does. On a busy machine two threads made a step ten times
    slower (1.2 s, 2 cores).
    """
    torch.set_num_threads(1)
    model = gpt.build(gpt.Shape(options.context), options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    done = train("single", model, optimizer, data, options, emit)
    return _record(done, model, options)


def _record(done: Trained, model: gpt.GPT, options: Options) -> Record:
    """What is known of any run. The parameters are whole."""
    return Record(
        parameters=gpt.elements(model),
        loss=done.loss,
        seconds=done.seconds,
        tokens_per_step=options.global_batch * options.context,
        digest=parameter_digest(model),
    )


def run_stages(job: Job, emit: Emit) -> list[Record]:
    """What each rank runs, on one thread: all stages, one after another."""
    torch.set_num_threads(1)
    transport = job.options.transport
    if transport in gpus.ON_GPU:
        gpus.take(transport)
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order
    comm = ringdp.init(transport=cast(TransportName, transport))
    data = job.text.read_bytes()
    file, records = job.options.trace, list[Record]()
    try:
        with nullcontext() if file is None else ringdp.trace(file):
            for stage in job.options.stages:
                records.append(_run_stage(stage, job.options, data, comm, emit))
    except ringdp.RingdpError as error:
        if len(records) < len(job.options.stages):
            raise
        if comm.rank == 0:  # the trace cannot be written; the runs have their results
            print(error, file=sys.stderr, flush=True)
    comm.close()
    return records


def _run_stage(
    stage: int, options: Options, data: bytes, comm: ringdp.Communicator, emit: Emit
) -> Record:
    model = gpt.build(gpt.Shape(options.context), options.seed).to(comm.device)
    engine = ringdp.shard(model, stage=stage, unit=gpt.Block, comm=comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    def mean(loss: Tensor) -> Tensor:
        comm.all_reduce(loss, op="avg")
        return loss

    done = train(
        f"stage {stage}",
        model,
        optimizer,
        data,
        options,
        emit if comm.rank == 0 else None,
        rows=options.rows(comm.rank),
        mean=mean,
        memory=lambda: engine.memory(optimizer)._asdict(),
        sent=engine.sent_bytes,
    )
    memory = engine.memory(optimizer)._asdict()
    sample = b""
    with engine.full_parameters():
        record = _record(done, model, options)
        if options.sample and stage == options.stages[-1]:
            sample = gpt.write(model, options.context, PROMPT, SAMPLE_BYTES, options.seed)
    formula = engine.traffic_formula()
    record = replace(
        record,
        stage=stage,
        ranks=comm.size,
        memory=memory,
        memory_formula=engine.memory_formula()._asdict(),
        sent=max(done.sent, key=lambda sent: abs(sent - formula)),  # the step furthest off
        sent_formula=formula,
        sample=sample,
    )
    engine.close()
    return record
