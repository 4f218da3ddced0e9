"""`ringdp bench`: measures, shows progress meanwhile, then prints the table.

The file is written after every size, so that an aborted run keeps the sizes that it finished.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from ringdp.cli.bench.options import Options, check
from ringdp.cli.bench.rows import Report
from ringdp.cli.bench.run import Step, measure
from ringdp.cli.bench.table import show
from ringdp.cli.console import say, say_written
from ringdp.cli.files import write_json
from ringdp.cli.launch import SignalError

BAR = 14  # characters
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bench(options: Options, console: Console) -> int:
    """Return the exit code: 0 if every result is right, 1 if not."""
    check(options)
    with _signals_raised():
        report = watch(options, console, partial(write_json, options.json))
    show(console, report, options)
    say_written(console, options.json)
    return 1 if any(row.wrong for row in report.rows) else 0


def watch(options: Options, console: Console, keep: Callable[[Report], None]) -> Report:
    """Measure, showing a bar on a terminal, and elsewhere a line per size."""
    if not console.is_terminal:
        sizes: set[int] = set()

        def line(step: Step) -> None:
            if step.size not in sizes:
                sizes.add(step.size)
                say(console, f"measuring {step.size:,} bytes")

        return measure(options, line, keep)
    # The description may wrap; the time may not.
    says = TextColumn("{task.description}", table_column=Column())
    parts = (says, BarColumn(BAR), TimeElapsedColumn())
    with Progress(*parts, console=console, transient=True) as progress:
        bar = progress.add_task("starting the ranks of every contender", total=None)

        def update(step: Step) -> None:
            says = f"{options.collective} {step.size:>13,} bytes  {step.entry:<12}"
            progress.update(bar, description=says, completed=step.done, total=1)

        return measure(options, update, keep)


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise SignalError at the first signal of ENDING; ignore later ones while the ranks end."""

    def end(signum: int, frame: FrameType | None) -> None:
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        raise SignalError(signum)

    before = {signum: signal.signal(signum, end) for signum in ENDING}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
