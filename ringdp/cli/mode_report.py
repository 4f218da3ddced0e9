"""The report of `ringdp train --mode`: a table with a column per mode, and checks.

Modes that apply all gradients in one step learn what the single process learns, within
Note [the bound on the loss]. A synchronous server and DDP add the same numbers in the same order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ringdp.cli.console import say, table
from ringdp.cli.modes import ModeRun
from ringdp.cli.options import Options
from ringdp.cli.record import Record
from ringdp.cli.report import add_pairs, say_wrong, show_titled
from ringdp.cli.verdict import too_far

EXACT = ("parameter-server", "ddp")  # equal bit for bit


def show(
    console: Console, runs: Sequence[ModeRun], reference: Record | None, problems: Sequence[str]
) -> None:
    show_titled(console, runs[0], _table(runs, reference))
    if not problems:
        say(console, _all_hold(runs, reference), "green")
    say_wrong(console, problems)


def complaints(runs: Sequence[ModeRun], reference: Record | None, options: Options) -> list[str]:
    """One line for each check that fails."""
    found = []
    tokens = options.global_batch * options.context
    for run in runs:
        if run.sent != run.sent_formula:
            found.append(f"{run.mode}: {run.sent:,} bytes sent, formula {run.sent_formula:,}")
        if not np.isfinite(run.loss).all():
            found.append(f"{run.mode}: a loss is not finite: training diverged")
        elif reference is not None and run.mode != "async":
            found += too_far(run.mode, run.loss, reference, tokens)
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
