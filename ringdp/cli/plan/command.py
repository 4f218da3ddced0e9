"""`ringdp plan`: checks what is asked, and shows the stages as tables or writes them as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ringdp.cli.bench.options import parse_bytes
from ringdp.cli.options import STAGES, between, check_writable
from ringdp.cli.plan.hardware import DEVICES, Network
from ringdp.cli.plan.hardware import network as network_of
from ringdp.cli.plan.models import Model, read
from ringdp.cli.plan.published import figures
from ringdp.cli.plan.stages import MOST_RANKS, Row, Setting, recommend, row
from ringdp.errors import RingdpError, UsageError
from ringdp.parallel.precision import Precision
from ringdp.schedule.cost import CLOSED, Machine

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
USED = ("all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS = [a for c, a in CLOSED if c == USED[0] and all((u, a) in CLOSED for u in USED)]
MOST_WIDTH = 100  # characters that the tables need; a file gets them
LEFT_OUT = (
    "Left out: activations, the gradients of the unit whose backward runs, attention's own flops "
    "(2 a parameter and token forward, 4 backward), launches, the input."
)


@dataclass(frozen=True)
class Options:
    model: str
    ranks: int = 64
    per_node: int = 8
    stages: tuple[int, ...] = STAGES
    precision: str = "bf16"
    reduce: str | None = None  # as the parameters compute
    network: str = "400Gb"
    batch: int = 1  # rows of a rank
    context: int = 1024  # tokens of a row
    device: str = "h100"
    utilisation: float = 0.4
    flops: float | None = None  # sustained; instead of device and utilisation
    memory: str | None = None
    alpha: float | None = None  # s a message; not with a bench file, which says it
    algorithm: str = "direct"
    json: Path | None = None


def plan(options: Options, console: Console) -> int:
    """The exit code, 0. Raises UsageError for bad input."""
    setting = check(options)
    model = read(options.model, precision(options))
    rows = [row(model, stage, setting) for stage in options.stages]
    says = recommend(rows, model, setting)
    _show(console, options, model, setting, rows, says)
    if options.json is not None:
        try:
            options.json.write_text(
                json.dumps(to_json(options, model, setting, rows, says), indent=1) + "\n"
            )
        except OSError as error:  # it was writable before
            raise RingdpError(f"ringdp: cannot write {options.json}: {error.strerror}") from None
    return 0


def check(options: Options) -> Setting:
    """Raises UsageError for the first thing that cannot work."""
    between("--ranks", options.ranks, 1, MOST_RANKS)
    between("--per-node", options.per_node, 1, MOST_RANKS)
    between("--batch", options.batch, 1, 1 << 20)
    between("--context", options.context, 1, 1 << 24)
    within = options.ranks <= options.per_node
    if not within and options.ranks % options.per_node:
        raise UsageError(
            f"--ranks is {options.ranks}; allowed: a multiple of --per-node, which is "
            f"{options.per_node}, or fewer"
        )
    _one_of("--precision", options.precision, PRECISIONS)
    if options.reduce is not None:
        _one_of("--reduce", options.reduce, PRECISIONS)
    _one_of("--device", options.device, DEVICES)
    _one_of("--algorithm", options.algorithm, ALGORITHMS)
    if not 0 < options.utilisation <= 1:
        raise UsageError(f"--utilisation is {options.utilisation}; allowed: above 0, at most 1")
    if options.flops is not None and not 0 < options.flops < math.inf:
        raise UsageError(f"--flops is {options.flops}; allowed: above 0, finite")
    if options.alpha is not None and not 0 <= options.alpha < math.inf:
        raise UsageError(f"--alpha is {options.alpha}; allowed: at least 0 s, finite")
    has = DEVICES[options.device]
    memory = has.memory if options.memory is None else parse_bytes("--memory", options.memory)
    between("--memory", memory, 1, 1 << 50)
    if options.json is not None:
        check_writable(options.json)
    peak = has.fp32 if options.precision == "fp32" else has.bf16
    return Setting(
        ranks=options.ranks,
        tokens=options.batch * options.context,
        memory=memory,
        flops=options.flops or options.utilisation * peak,
        bandwidth=has.bandwidth,
        network=network_of(options.network, options.device, within=within, alpha=options.alpha),
        algorithm=options.algorithm,
    )


def precision(options: Options) -> Precision:
    reduce = None if options.reduce is None else PRECISIONS[options.reduce] or torch.float32
    return Precision(param=PRECISIONS[options.precision], reduce=reduce)


def to_json(
    options: Options, model: Model, setting: Setting, rows: Sequence[Row], says: str
) -> dict[str, Any]:
    machine = setting.network.machine
    return {
        "model": model.name,
        "parameters": model.elements,
        "units": len(model.parts),
        "ranks": setting.ranks,
        "per_node": options.per_node,
        "precision": options.precision,
        "tokens_per_rank": setting.tokens,
        "memory_bytes": setting.memory,
        "flops_per_second": setting.flops,
        "network": {
            "source": setting.network.source,
            **machine._asdict(),
            "fitted": {name: m._asdict() for name, m in setting.network.fitted.items()},
            "beside_compute": setting.network.beside(setting.ranks),
        },
        "algorithm": setting.algorithm,
        "stages": [
            {
                "stage": r.stage,
                "memory": r.memory._asdict(),
                "memory_total": r.total,
                "fits": r.fits,
                "largest_parameters": r.largest,
                "sent_bytes": r.sent,
                "seconds": {
                    **r.step._asdict(),
                    "hidden": r.step.hidden,
                    "total": r.step.total,
                },
                "extrapolated": r.extrapolated,
            }
            for r in rows
        ],
        "recommendation": says,
    }


def show_published(console: Console) -> int:
    """The published tables, each figure beside both formulas."""
    for source, group in groupby(figures(), key=lambda f: f.source):
        made = _table("stage", "published", "their formula", "ringdp, bf16")
        for f in group:
            figures_of = (f"{f.published:g}", f"{f.theirs:.2f}", f"{f.engine:.2f}")
            made.add_row(str(f.stage), *figures_of)
        console.print(f"\n{source}", soft_wrap=True)
        console.print(made)
    console.print(
        "ZeRO's formula is the engine's for 2-byte parameters with 12 bytes of state an element. "
        "In bf16 the engine holds gradients for its optimizer in float32, and in stages 0 and 1 "
        "the reduced bucket too. DeepSpeed's stage 2 counts every gradient whole, the engine's "
        "one bucket; in stage 3 both hold 18 bytes an element over n, DeepSpeed and one layer, "
        "the engine and two units gathered, one bucket. ZeRO's rows leave these out.",
        soft_wrap=True,
    )
    return 0


def _one_of(name: str, given: str, allowed: dict[str, Any] | list[str]) -> None:
    if given not in allowed:
        raise UsageError(f"{name} is {given!r}; allowed: {', '.join(allowed)}")


def _show(
    console: Console,
    options: Options,
    model: Model,
    setting: Setting,
    rows: Sequence[Row],
    says: str,
) -> None:
    if not console.is_terminal:
        console = Console(file=console.file, width=MOST_WIDTH, highlight=False)
    rate = "given" if options.flops else f"{options.device} × {options.utilisation:g}, assumed"
    network = setting.network
    fits = [f"{name}: {_terms(machine)}" for name, machine in network.fitted.items()]
    hides = "" if network.beside(setting.ranks) else _not_beside(network)
    for line in (
        f"{model.name}: {model.elements:,} parameters in {len(model.parts)} units, "
        f"{options.precision}",
        f"{setting.ranks} ranks, {setting.tokens:,} tokens each; "
        f"{setting.flops / 1e12:.4g} Tflop/s ({rate}); memory {setting.memory / 1e9:.4g} GB",
        f"{setting.algorithm} over {network.source}{hides}",
        *(fits or [_terms(network.machine)]),
        "\nHeld by a rank, GB",
    ):
        console.print(line, soft_wrap=True)
    held = _table(
        "stage", "params", "gathered", "grads", "buckets", "optimizer", "total", "fits", "largest"
    )
    for r in rows:
        cells = [f"{b / 1e9:,.3f}" for b in (*r.memory, r.total)]
        largest = f"{r.largest / 1e9:,.2f}e9" if r.largest else "none"
        held.add_row(str(r.stage), *cells, "yes" if r.fits else "no", largest)
    console.print(held)
    console.print("One step of a rank: GB sent, ms predicted", soft_wrap=True)
    times = _table("stage", "sent", "compute", "wire", "hidden", "exposed", "optimizer", "step", "")
    for r in rows:
        s = r.step
        parts = (s.compute, s.communication, s.hidden, s.exposed, s.optimizer, s.total)
        label = "extrapolated" if r.extrapolated else ""
        times.add_row(
            str(r.stage), f"{r.sent / 1e9:,.3f}", *(f"{1e3 * x:,.2f}" for x in parts), label
        )
    console.print(times)
    for reasons in dict.fromkeys("; ".join(r.extrapolated) for r in rows if r.extrapolated):
        console.print(f"Extrapolated: {reasons}.", soft_wrap=True)
    console.print(LEFT_OUT, soft_wrap=True)
    console.print(f"Recommended: {says}.", soft_wrap=True)


def _terms(machine: Machine) -> str:
    units = ("s", "s/B", "s/B", "s/B")
    named = zip(("α", "β", "γ", "bus"), machine, units, strict=True)
    return ", ".join(f"{name} {x:.3g} {unit}" for name, x, unit in named if x)


def _not_beside(network: Network) -> str:
    return f"; the {network.cores} cores that compute move the bytes, so nothing is hidden"


def _table(*headings: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    return made
