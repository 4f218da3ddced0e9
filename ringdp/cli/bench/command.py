"""`ringdp bench`: measures, shows progress meanwhile, then prints the table.

The file is written after every size, so that an aborted run keeps the sizes that it finished.
"""

from __future__ import annotations

from functools import cache

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from ringdp.cli.bench.options import Options, check
from ringdp.cli.bench.rows import Report
from ringdp.cli.bench.run import Step, measure
from ringdp.cli.bench.table import show
from ringdp.cli.console import finish, say
from ringdp.cli.launch import signals_raised

BAR = 14  # characters


def bench(options: Options, console: Console) -> int:
    """Return the exit code: 0 if every result is right, 1 if not."""
    check(options)
    with signals_raised():
        report = watch(options, console)
    finish(console, options.json, report, lambda: show(console, report, options))
    return 1 if any(row.wrong for row in report.rows) else 0


def watch(options: Options, console: Console) -> Report:
    """Measure, showing a bar on a terminal, and elsewhere a line per size."""
    if not console.is_terminal:
        announce = cache(lambda size: say(console, f"measuring {size:,} bytes"))  # each size once
        return measure(options, lambda step: announce(step.size))
    # The description may wrap; the time may not.
    says = TextColumn("{task.description}", table_column=Column())
    parts = (says, BarColumn(BAR), TimeElapsedColumn())
    with Progress(*parts, console=console, transient=True) as progress:
        bar = progress.add_task("starting the ranks of every contender", total=None)

        def update(step: Step) -> None:
            says = f"{options.collective} {step.size:>13,} bytes  {step.entry:<12}"
            progress.update(bar, description=says, completed=step.done, total=1)

        return measure(options, update)
