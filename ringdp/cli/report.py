"""The table at the end of `ringdp train`: a column a stage, a row a quantity.

Where the console is wide enough a cell says "measured = formula"; else the formula has a row of its
own below. Both say ≠ in red where they differ.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringdp.cli.console import say, show_table, width_of
from ringdp.cli.record import MEMORY, Record
from ringdp.cli.verdict import differences, equal_bits, loss_bound


def final_table(runs: Sequence[Record], reference: Record | None, console: Console) -> Table:
    """The wide form where it fits, else the narrow one."""
    wide = _table(runs, reference, beside=True)
    return (
        wide if width_of(console, wide) <= console.width else _table(runs, reference, beside=False)
    )


def _table(runs: Sequence[Record], reference: Record | None, *, beside: bool) -> Table:
    table = Table(
        title=_title(runs[0]),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1 if beside else 0),
        pad_edge=False,
    )
    table.add_column("bytes are per rank", no_wrap=True, header_style="dim")
    for run in runs:
        table.add_column(f"stage {run.stage}", justify="right", no_wrap=True)
    table.add_row("final loss", *(f"{run.loss[-1]:.6f}" for run in runs))
    if reference is not None:
        _add_reference(table, runs, reference)
    table.add_row("step ms, p50", *(f"{run.milliseconds(50):.1f}" for run in runs))
    table.add_section()
    for key in MEMORY:
        pairs = [(run.memory[key], run.memory_formula[key]) for run in runs]
        _add_pairs(table, key.replace("_", " "), pairs, beside=beside)
    table.add_section()
    pairs = [(run.sent, run.sent_formula) for run in runs]
    _add_pairs(table, "sent per step", pairs, beside=beside)
    return table


def equality_line(runs: Sequence[Record]) -> str | None:
    """What the stages' bits say, or None where there is only one stage."""
    if len(runs) < 2:
        return None
    stages = ", ".join(str(run.stage) for run in runs)
    if equal_bits(runs):
        return f"Stages {stages} are equal bit for bit: every loss, every final parameter."
    return f"Stages {stages} are NOT equal bit for bit."


def sample_line(sample: bytes) -> str:
    """On one line: other bytes than printable ASCII, and backslashes, as in a bytes literal."""
    plain = set(range(32, 127)) - {ord("\\")}
    return "".join(chr(c) if c in plain else repr(bytes([c]))[2:-1] for c in sample)


def show(
    console: Console, runs: Sequence[Record], reference: Record | None, problems: Sequence[str]
) -> None:
    console.print()
    show_table(console, final_table(runs, reference, console))
    line = equality_line(runs)
    if line is not None:
        say(console, line, "green" if equal_bits(runs) else "bold red")
    if not problems:
        say(console, _all_hold(reference), "green")
    if runs[-1].sample:
        say(console, f"It writes: {sample_line(runs[-1].sample)}")
    for problem in problems:
        say(console, f"WRONG: {problem}", "bold red")


def _title(run: Record) -> str:
    plural = "s" if run.ranks > 1 else ""
    return f"{run.parameters:,} parameters, {run.ranks} rank{plural}, {len(run.loss)} steps"


def _all_hold(reference: Record | None) -> str:
    bound = "" if reference is None else " Losses stay within the float32 bound."
    return f"Bytes held and sent equal their formulas.{bound}"


def _add_reference(table: Table, runs: Sequence[Record], reference: Record) -> None:
    """The largest |Δloss|, with the bound of the step where it comes closest to its own."""
    table.add_row("  one process alone", *(f"{reference.loss[-1]:.6f}" for _ in runs), style="dim")
    gaps = [differences(run.loss, reference) for run in runs]
    table.add_row("largest |Δloss|", *(f"{max(gap):.2e}" for gap in gaps))
    bounds = [_bound_at_largest(run, gap, reference) for run, gap in zip(runs, gaps, strict=True)]
    table.add_row("  float32 bound there", *(f"{bound:.2e}" for bound in bounds), style="dim")


def _bound_at_largest(run: Record, gap: Sequence[float], reference: Record) -> float:
    return loss_bound(gap.index(max(gap)), run.tokens_per_step, reference.loss[0])


def _add_pairs(table: Table, label: str, pairs: Sequence[tuple[int, int]], *, beside: bool) -> None:
    """Each pair is (measured, formula)."""
    if beside:
        both = [_marked(f"{a:,} {'=' if a == b else '≠'} {b:,}", good=a == b) for a, b in pairs]
        table.add_row(f"{label} = formula", *both)
        return
    table.add_row(label, *(_marked(f"{a:,}", good=a == b) for a, b in pairs))
    formulas = [_marked(f"{'=' if a == b else '≠'} {b:,}", good=a == b) for a, b in pairs]
    table.add_row("  formula", *formulas, style="dim")


def _marked(cell: str, *, good: bool) -> Text:
    return Text(cell, style="" if good else "bold red")
