"""`ringdp train`: run the single process and the stages, compare them, and report."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from ringdp.cli import modes, text
from ringdp.cli.console import counted, finish, say, say_written
from ringdp.cli.gpus import check_transport
from ringdp.cli.launch import Entry, launch, signals_raised, warm_up
from ringdp.cli.options import Options, check
from ringdp.cli.progress import Display
from ringdp.cli.report import show
from ringdp.cli.runs import Job, Progress, Record, run_single, run_stages, to_json
from ringdp.cli.verdict import complaints


def run(options: Options, console: Console, *, entry: Entry[Job, list[Record]] = run_stages) -> int:
    """Return the exit code: 0 if every promise holds, 1 if a number is not what it must be.

    `entry` is what each rank runs. Raises UsageError before anything starts, and RankError or
    SignalError after everything has ended.
    """
    check(options)
    check_transport(options.transport)
    learned = text.load(options.text, options.context + 1)
    say(
        console,
        f"Learning {len(learned.data):,} bytes of {learned.source} "
        f"({counted(learned.files, 'file')}): {counted(options.steps, 'step')} of "
        f"{counted(options.global_batch, 'row')} × {counted(options.context, 'byte')}"
        f"{'' if options.transport == Options.transport else f', over {options.transport}'}",
    )
    if options.modes and options.ranks > 1:
        say(console, "While a mode runs, the loss is of one worker's rows; in the table, of all.")
    with signals_raised() as raise_again, Display(console, memory=not options.modes) as display:

        def update(progress: Progress) -> None:
            raise_again()
            display.update(progress)

        warm_up(modes.part if options.modes else entry)
        reference = None
        if options.reference:
            reference = run_single(options, learned.data, update)
        if options.modes:
            runs = [modes.run_mode(m, options, learned, update) for m in options.modes]
        else:
            with _warn_without_trace(options.trace) as traced, learned.shared() as file:
                ranks = launch(entry, Job(options, file), options.ranks, update)
    if options.modes:
        found = [modes.to_json(run) for run in runs]
        problems = modes.complaints(runs, reference)
        report = partial(modes.show, console, runs, reference, problems)
    else:
        found = [to_json(run) for run in ranks[0]]
        problems = complaints(ranks, reference)
        report = partial(show, console, ranks[0], reference, problems)
    finish(console, options.json, found[0] if len(found) == 1 else found, report)
    if options.trace is not None and not traced():
        return 1
    and_then = f"; `ringdp report {options.trace} --html FILE` makes a page of it"
    say_written(console, options.trace, and_then)
    return 1 if problems else 0


@contextmanager
def _warn_without_trace(path: Path | None) -> Iterator[Callable[[], bool]]:
    """Say so if the ranks end without having written the trace. Yields whether they have so far."""
    before = _changed(path)

    def traced() -> bool:
        return _changed(path) != before

    try:
        yield traced
    finally:
        if path is not None and not traced():
            print(f"ringdp: no trace was written to {path}", file=sys.stderr)


def _changed(path: Path | None) -> int | None:
    return path.stat().st_mtime_ns if path is not None and path.exists() else None
