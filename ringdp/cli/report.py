"""The table at the end of `ringdp train`: a column per stage, a row per quantity.

A quantity that has a formula is followed by the formula's value, marked `=`, or `≠` in red.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringdp.cli.console import counted, say, show_table, table
from ringdp.cli.runs import MEMORY, Record
from ringdp.cli.verdict import differences, equal_bits, loss_bound


def _table(runs: Sequence[Record], reference: Record | None) -> Table:
    what = "bytes are per rank"
    made = table(what, *(f"stage {run.stage}" for run in runs), left=(what,))
    made.padding = 0  # four stages of 100 MB in 80 columns
    made.columns[0].header_style = "dim"
    made.add_row("final loss", *(f"{run.loss[-1]:.6f}" for run in runs))
    if reference is not None:
        _add_reference(made, runs, reference)
    made.add_row("step ms, p50", *(f"{run.milliseconds(50):.1f}" for run in runs))
    made.add_section()
    for key in MEMORY:
        pairs = [(run.memory[key], run.memory_formula[key]) for run in runs]
        add_pairs(made, key.replace("_", " "), pairs)
    made.add_section()
    add_pairs(made, "sent per step", [(run.sent, run.sent_formula) for run in runs])
    return made


def sample_line(sample: bytes) -> str:
    """The sample on one line: backslashes and all but printable ASCII as in a bytes literal."""
    plain = set(range(32, 127)) - {ord("\\")}
    return "".join(chr(c) if c in plain else repr(bytes([c]))[2:-1] for c in sample)


def show(
    console: Console, runs: Sequence[Record], reference: Record | None, problems: Sequence[str]
) -> None:
    of = runs[0]
    show_titled(console, _table(runs, reference), of.parameters, of.ranks, len(of.loss))
    if len(runs) > 1:
        _say_equality(console, runs)
    if not problems:
        say(console, _all_hold(reference), "green")
    if runs[-1].sample:
        say(console, f"It writes: {sample_line(runs[-1].sample)}")
    say_wrong(console, problems)


def show_titled(console: Console, made: Table, parameters: int, ranks: int, steps: int) -> None:
    """Show the table under a heading with the sizes of its runs."""
    counts = ((parameters, "parameter"), (ranks, "rank"), (steps, "step"))
    console.print()
    say(console, ", ".join(counted(*count) for count in counts), "bold")
    show_table(console, made)


def say_wrong(console: Console, problems: Sequence[str]) -> None:
    for problem in problems:
        say(console, f"WRONG: {problem}", "bold red")


def _say_equality(console: Console, runs: Sequence[Record]) -> None:
    stages = ", ".join(str(run.stage) for run in runs)
    if equal_bits(runs):
        says = f"Stages {stages} are equal bit for bit: every loss, every final parameter."
        say(console, says, "green")
    else:
        say(console, f"Stages {stages} are NOT equal bit for bit.", "bold red")


def _all_hold(reference: Record | None) -> str:
    bound = "" if reference is None else " Losses stay within the float32 bound."
    return f"Bytes held and sent equal their formulas.{bound}"


def _add_reference(table: Table, runs: Sequence[Record], reference: Record) -> None:
    """The largest |Δloss|, and below it the bound at the step where it occurs."""
    table.add_row("  one process alone", *(f"{reference.loss[-1]:.6f}" for _ in runs), style="dim")
    gaps = [differences(run.loss, reference) for run in runs]
    table.add_row("largest |Δloss|", *(f"{max(gap):.2e}" for gap in gaps))
    bounds = [loss_bound(gap.index(max(gap)), reference) for gap in gaps]
    table.add_row("  float32 bound there", *(f"{bound:.2e}" for bound in bounds), style="dim")


def add_pairs(made: Table, label: str, pairs: Sequence[tuple[int, int]]) -> None:
    """Each pair is (measured, formula)."""
    styles = ["" if a == b else "bold red" for a, b in pairs]
    for name, cells, style in (
        (label, [f"{a:,}" for a, _ in pairs], ""),
        ("  formula", [f"{'=' if a == b else '≠'} {b:,}" for a, b in pairs], "dim"),
    ):
        made.add_row(name, *map(Text, cells, styles), style=style)
