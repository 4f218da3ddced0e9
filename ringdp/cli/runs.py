"""The runs that `ringdp train` compares: one process alone, and every rank through the stages."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch

import ringdp
from ringdp.cli import gpt, gpus, text
from ringdp.cli.options import Options
from ringdp.cli.record import Record
from ringdp.cli.training import Progress, Step, parameter_digest, train
from ringdp.comm.rendezvous import TransportName

REPORT_EVERY = 0.2  # s
PROMPT = b"def "
SAMPLE_BYTES = 120


@dataclass(frozen=True)
class Job:
    """What every rank is given. The text is not in it: each rank reads it itself, which starts
    all of them at once, where megabytes through a pipe would start one after another."""

    options: Options
    text_digest: str
    mode: str = ""  # none: all stages


def text_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load(options: Options, expected: str) -> bytes:
    """The text, in a rank."""
    data = text.load(options.text, options.context + 1).data
    if text_digest(data) != expected:
        raise ringdp.RingdpError("the text changed while the ranks were starting; run again")
    return data


def run_single(options: Options, data: bytes, emit: Callable[[Progress], None]) -> Record:
    """The reference: the same model and batches in this process.

    On one thread, as a rank: on a busy machine two made a step ten times slower (1.2 s, 2 cores).
    """
    torch.set_num_threads(1)
    model = gpt.build(gpt.Shape(options.context), options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    steps = train(model, optimizer, data, options, rows=slice(None), mean=lambda loss: loss)
    done = followed(steps, "single", options, emit)
    return Record(
        stage=None,
        ranks=1,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        loss=done.loss,
        seconds=done.seconds,
        tokens_per_step=options.global_batch * options.context,
        digest=parameter_digest(model),
        sample=_sample(model, options),
        memory={},
        memory_formula={},
        sent=0,
        sent_formula=0,
    )


def run_stages(job: Job, emit: Callable[[Progress], None]) -> list[Record]:
    """What each rank runs, on one thread: all stages, one after another."""
    torch.set_num_threads(1)
    transport = job.options.transport
    if transport in gpus.OURS:
        gpus.take(transport)
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order
    comm = ringdp.init(transport=cast(TransportName, transport))
    data = load(job.options, job.text_digest)
    file = job.options.trace
    with nullcontext() if file is None else ringdp.trace(file):
        records = [_run_stage(stage, job.options, data, comm, emit) for stage in job.options.stages]
    comm.close()
    return records


def _run_stage(
    stage: int,
    options: Options,
    data: bytes,
    comm: ringdp.Communicator,
    emit: Callable[[Progress], None],
) -> Record:
    model = gpt.build(gpt.Shape(options.context), options.seed).to(comm.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = ringdp.shard(model, stage=stage, unit=gpt.Block, comm=comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    def mean(loss: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(loss, op="avg")
        return loss

    share = options.global_batch // comm.size
    rows = slice(comm.rank * share, (comm.rank + 1) * share)
    steps = train(model, optimizer, data, options, rows=rows, mean=mean)
    done = followed(
        steps,
        f"stage {stage}",
        options,
        emit if comm.rank == 0 else silent,
        memory=lambda: engine.memory(optimizer)._asdict(),
        sent=engine.sent_bytes,
    )
    memory = engine.memory(optimizer)._asdict()
    with engine.full_parameters():
        digest = parameter_digest(model)
        sample = _sample(model, options)
    formula = engine.traffic_formula()
    record = Record(
        stage=stage,
        ranks=comm.size,
        parameters=parameters,
        loss=done.loss,
        seconds=done.seconds,
        tokens_per_step=options.global_batch * options.context,
        digest=digest,
        sample=sample,
        memory=memory,
        memory_formula=engine.memory_formula()._asdict(),
        sent=max(done.sent, key=lambda sent: abs(sent - formula)),  # so that no other hides it
        sent_formula=formula,
    )
    engine.close()
    return record


class Followed(NamedTuple):
    """Of all steps, one after another."""

    loss: tuple[float, ...]
    seconds: tuple[float, ...]
    sent: tuple[int, ...]  # bytes


def followed(
    steps: Iterator[Step],
    run: str,
    options: Options,
    emit: Callable[[Progress], None],
    *,
    memory: Callable[[], dict[str, int]] = dict,
    sent: Callable[[], int] = lambda: 0,
) -> Followed:
    """Take all steps, and emit progress after the first, the last, and every REPORT_EVERY.

    `sent`: bytes so far.
    """
    done, totals, spent, due = list[Step](), [sent()], 0.0, 0.0
    for step in steps:
        done.append(step)
        totals.append(sent())
        spent += step.seconds
        if time.monotonic() >= due or len(done) == options.steps:
            due = time.monotonic() + REPORT_EVERY
            speed = options.global_batch * options.context * len(done) / spent
            emit(Progress(run, len(done), options.steps, step.loss, speed, memory()))
    loss, seconds = zip(*done, strict=True)
    return Followed(loss, seconds, tuple(after - before for before, after in pairwise(totals)))


def _sample(model: gpt.GPT, options: Options) -> bytes:
    if not options.sample:
        return b""
    return gpt.write(model, options.context, PROMPT, SAMPLE_BYTES, options.seed)


def silent(_: Progress) -> None:
    """Rank 0 speaks for all."""
