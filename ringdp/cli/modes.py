"""The runs of `ringdp train --mode`: older forms of data parallelism, and DDP.

    naive             one process with a replica per rank
    parameter-server  a server and a worker per rank; a step applies all workers' gradients
    async             the same, but each gradient is a step of its own
    ddp               ringdp.DistributedDataParallel

In each mode `ranks` models compute gradients; a server is one more process.

The report is a table with a column per mode, and checks. Modes that apply all gradients in one step
learn what the single process learns, within Note [the bound on the loss]. A synchronous server and
DDP add the same numbers in the same order.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import ringdp
from ringdp.cli import gpt
from ringdp.cli.console import say, table
from ringdp.cli.launch import launch
from ringdp.cli.options import Options
from ringdp.cli.report import add_pairs, say_wrong, show_titled
from ringdp.cli.runs import Emit, Job, Optimizer, Record, Trained, parameter_digest, train
from ringdp.cli.text import Text
from ringdp.cli.verdict import too_far
from ringdp.parallel.simple import SERVER, DataParallel, RemoteOptimizer, serve, serve_each

EXACT = ("parameter-server", "ddp")  # equal bit for bit


@dataclass(frozen=True)
class Part:
    """What one process measured."""

    loss: tuple[float, ...]  # of its own rows, one per step; empty for a server
    seconds: tuple[float, ...]
    sent: int  # bytes in most steps; for a server, the average of a step
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
    with learned.shared() as file:
        parts = launch(part, Job(options, file, mode), n + served, emit)
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
    options, mode = job.options, job.mode
    data = job.text.read_bytes()
    net: nn.Module
    net = model = gpt.build(gpt.Shape(options.context), options.seed)
    with ringdp.init() as comm:
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
        report = emit if comm.rank == comm.size - 1 else None
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
    # In its second step DDP also agrees on the order of its buckets.
    sent = statistics.mode(done.sent)
    return Part(done.loss, done.seconds, sent, parameter_digest(model))


def show(
    console: Console, runs: Sequence[ModeRun], reference: Record | None, problems: Sequence[str]
) -> None:
    of = runs[0]
    show_titled(console, _table(runs, reference), of.parameters, of.ranks, len(of.loss))
    if not problems:
        say(console, _all_hold(runs, reference), "green")
    say_wrong(console, problems)


def complaints(runs: Sequence[ModeRun], reference: Record | None) -> list[str]:
    """One line for each check that fails."""
    found = []
    for run in runs:
        if run.sent != run.sent_formula:
            found.append(f"{run.mode}: {run.sent:,} bytes sent, formula {run.sent_formula:,}")
        if not np.isfinite(run.loss).all():
            found.append(f"{run.mode}: a loss is not finite: training diverged")
        elif reference is not None and run.mode != "async":
            found += too_far(run.mode, run.loss, reference)
        if run.mode != "async" and len({part.digest for part in run.parts}) > 1:
            found.append(f"{run.mode}: processes differ in a parameter after the last step")
    exact = [run for run in runs if run.mode in EXACT]
    if len({(run.loss, run.parts[-1].digest) for run in exact}) > 1:
        found.append(f"{' and '.join(EXACT)} differ in a loss or a parameter")
    return found


def to_json(run: ModeRun) -> dict[str, Any]:
    return {
        "mode": run.mode,
        "ranks": run.ranks,
        "parameters": run.parameters,
        "loss": list(run.loss),
        "step_ms": {"p50": round(run.milliseconds, 3)},
        "traffic": {
            "sent_bytes_per_step": run.sent,
            "formula": run.sent_formula,
            "busiest_process": run.busiest,
        },
        "staleness": list(run.staleness),
    }


def _all_hold(runs: Sequence[ModeRun], reference: Record | None) -> str:
    lines = ["Bytes sent equal their formulas."]
    modes = [run.mode for run in runs]
    if reference is not None and modes != ["async"]:
        but = ", but for async's, which has none" if "async" in modes else ""
        lines.append(f"Losses stay within the float32 bound{but}.")
    if all(mode in modes for mode in EXACT):
        lines.append(f"{' and '.join(EXACT)} are equal bit for bit.")
    return " ".join(lines)


def _table(runs: Sequence[ModeRun], reference: Record | None) -> Table:
    made = table("bytes are per step", *(run.mode for run in runs), left=("bytes are per step",))
    made.columns[0].header_style = "dim"
    made.add_row("processes", *(f"{len(run.parts)}" for run in runs))
    made.add_row("final loss", *(f"{run.loss[-1]:.6f}" for run in runs))
    if reference is not None:
        alone = f"{reference.loss[-1]:.6f}"
        made.add_row("  one process alone", *(alone for _ in runs), style="dim")
    made.add_row("step ms, p50", *(f"{run.milliseconds:.1f}" for run in runs))
    made.add_section()
    add_pairs(made, "sent, all processes", [(run.sent, run.sent_formula) for run in runs])
    made.add_row("sent, the busiest", *(f"{run.busiest:,}" for run in runs))
    made.add_row("staleness, mean", *(_of(run, np.mean) for run in runs))
    made.add_row("  most", *(_of(run, np.max) for run in runs))
    return made


def _of(run: ModeRun, summary: Any) -> str:
    if not run.staleness:
        return "0" if run.mode != "async" else "-"
    return f"{summary(run.staleness):.2f}".removesuffix(".00")
