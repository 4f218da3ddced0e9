"""The runs that `ringdp train` compares: a single process, and every rank in every stage."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch

import ringdp
from ringdp.cli import gpt, gpus, text
from ringdp.cli.options import Options
from ringdp.cli.record import Record
from ringdp.cli.training import Progress, parameter_digest, train
from ringdp.comm.rendezvous import TransportName

PROMPT = b"def "
SAMPLE_BYTES = 120


@dataclass(frozen=True)
class Job:
    """What every rank is given.

    The text is not part of it. Each rank reads the text itself, so that all ranks start at once:
    megabytes through a pipe would start them one after another.
    """

    options: Options
    text_digest: str
    mode: str = ""  # empty: all stages

    def load_text(self) -> bytes:
        found = text.load(self.options.text, self.options.context + 1)
        if found.digest != self.text_digest:
            raise ringdp.RingdpError("the text changed while the ranks were starting; run again")
        return found.data


def run_single(options: Options, data: bytes, emit: Callable[[Progress], None]) -> Record:
    """The reference: the same model and batches in this process.

    It uses one thread, as each rank does. On a busy machine two threads made a step ten times
    slower (1.2 s, 2 cores).
    """
    torch.set_num_threads(1)
    model = gpt.build(gpt.Shape(options.context), options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    done = train("single", model, optimizer, data, options, emit)
    return Record(
        parameters=gpt.elements(model),
        loss=done.loss,
        seconds=done.seconds,
        tokens_per_step=options.global_batch * options.context,
        digest=parameter_digest(model),
        sample=_sample(model, options),
    )


def run_stages(job: Job, emit: Callable[[Progress], None]) -> list[Record]:
    """What each rank runs, on one thread: all stages, one after another."""
    torch.set_num_threads(1)
    transport = job.options.transport
    if transport in gpus.OURS:
        gpus.take(transport)
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order
    comm = ringdp.init(transport=cast(TransportName, transport))
    data = job.load_text()
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
    parameters = gpt.elements(model)
    engine = ringdp.shard(model, stage=stage, unit=gpt.Block, comm=comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    def mean(loss: torch.Tensor) -> torch.Tensor:
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
        sent=max(done.sent, key=lambda sent: abs(sent - formula)),  # the step furthest off
        sent_formula=formula,
    )
    engine.close()
    return record


def _sample(model: gpt.GPT, options: Options) -> bytes:
    if not options.sample:
        return b""
    return gpt.write(model, options.context, PROMPT, SAMPLE_BYTES, options.seed)
