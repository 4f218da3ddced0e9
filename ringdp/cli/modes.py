"""The runs of `ringdp train --mode`: older forms of data parallelism, and DDP.

    naive             one process with a replica per rank
    parameter-server  a server and a worker per rank; a step applies all workers' gradients
    async             the same, but each gradient is a step of its own
    ddp               ringdp.DistributedDataParallel

In each mode `ranks` models compute gradients; a server is one more process.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import ringdp
from ringdp.cli import gpt
from ringdp.cli.launch import launch
from ringdp.cli.options import Options
from ringdp.cli.runs import Job
from ringdp.cli.text import Text
from ringdp.cli.training import Optimizer, Progress, Trained, parameter_digest, train
from ringdp.parallel.simple import SERVER, DataParallel, RemoteOptimizer, serve, serve_each

Emit = Callable[[Progress], None]


@dataclass(frozen=True)
class Part:
    """What one process measured."""

    loss: tuple[float, ...]  # of its own rows, one per step; empty for a server
    seconds: tuple[float, ...]
    sent: int  # bytes in the last step; for a server, the average of a step
    digest: str  # of the final parameters
    staleness: tuple[int, ...] = ()  # of each gradient; asynchronous servers only


@dataclass(frozen=True)
class ModeRun:
    """One mode: all of its processes."""

    mode: str
    ranks: int
    parameters: int  # elements of the model
    parts: tuple[Part, ...]
    sent_formula: int  # bytes per step, of all processes

    @property
    def loss(self) -> tuple[float, ...]:
        """The mean over the global batch, one per step."""
        learning = [part.loss for part in self.parts if part.loss]
        return tuple(sum(losses) / len(learning) for losses in zip(*learning, strict=True))

    @property
    def milliseconds(self) -> float:
        """The median time of a step."""
        return float(np.median(self.parts[-1].seconds)) * 1e3

    @property
    def sent(self) -> int:
        return sum(part.sent for part in self.parts)

    @property
    def busiest(self) -> int:
        """Bytes sent by the process that sends most."""
        return max(part.sent for part in self.parts)

    @property
    def staleness(self) -> tuple[int, ...]:
        return self.parts[0].staleness


def run_mode(mode: str, options: Options, learned: Text, emit: Emit) -> ModeRun:
    """Run one mode and compute its traffic formula.

    With n ranks and P bytes of parameters, a step sends 2(n − 1)P bytes, or 2nP through a server.
    Naive mode also copies tokens, outputs and the outputs' gradients.
    """
    n, model = options.ranks, gpt.GPT(gpt.Shape(options.context))
    elements = gpt.elements(model)
    size = 4 * elements
    if mode == "naive":
        rows = options.global_batch * options.context * (n - 1) // n
        logits = rows * gpt.VOCABULARY * 4
        formula = 2 * (n - 1) * size + rows * 8 + 2 * logits
        return ModeRun(mode, n, elements, (_naive(options, learned.data, emit),), formula)
    served = mode != "ddp"
    job = Job(options, learned.digest, mode)
    parts = launch(part, job, n + served, emit)
    return ModeRun(mode, n, elements, tuple(parts), 2 * (n if served else n - 1) * size)


def _naive(options: Options, data: bytes, emit: Emit) -> Part:
    torch.set_num_threads(1)
    model = DataParallel(gpt.build(gpt.Shape(options.context), options.seed), options.ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    done = train("naive", model, optimizer, data, options, emit, sent=lambda: model.copied)
    return _measured(done, model)


def part(job: Job, emit: Emit) -> Part:
    """What each process of the other modes runs, on one thread."""
    torch.set_num_threads(1)
    with ringdp.init() as comm:
        return _part(job, comm, emit)


def _part(job: Job, comm: ringdp.Communicator, emit: Emit) -> Part:
    options, mode = job.options, job.mode
    data = job.load_text()
    net: nn.Module
    net = model = gpt.build(gpt.Shape(options.context), options.seed)
    report = emit if comm.rank == comm.size - 1 else None
    if mode == "ddp":
        net = ddp = ringdp.DistributedDataParallel(model)
        optimizer: Optimizer = torch.optim.AdamW(net.parameters(), lr=options.learning_rate)
        worker, sent = comm.rank, ddp.sent_bytes
    elif comm.rank == SERVER:
        return _serve(mode, options, model, comm)
    else:
        scale = 1 / options.ranks if mode == "parameter-server" else 1.0
        optimizer = RemoteOptimizer(model, comm, scale=scale)
        worker, sent = comm.rank - 1, comm.sent_bytes
    rows = options.rows(worker)
    done = train(mode, net, optimizer, data, options, report, rows=rows, sent=sent)
    return _measured(done, model)


def _serve(mode: str, options: Options, model: nn.Module, comm: ringdp.Communicator) -> Part:
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    staleness: list[int] = []
    if mode == "async":
        staleness = serve_each(model, optimizer, comm, options.steps)
    else:
        serve(model, optimizer, comm, options.steps)
    sent = comm.sent_bytes() // options.steps
    return Part((), (), sent, parameter_digest(model), tuple(staleness))


def _measured(done: Trained, model: nn.Module) -> Part:
    return Part(done.loss, done.seconds, done.sent[-1], parameter_digest(model))
