"""Consoles that print text literally, without markup, and tables that fit.

On a terminal, lines break between words, and a table that is too wide is split by columns into
several. A file gets every line and every table whole.
"""

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import IO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ringdp.cli.exits import print_nowhere
from ringdp.cli.files import write_json

MOST_WIDTH = 10_000  # characters: no terminal is wider


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """When nobody reads on, as in `| head`, the run goes on and writes its files."""
        self.quiet = True
        print_nowhere()


def plain(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console on `file`, by default standard output."""
    return _Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style), soft_wrap=not console.is_terminal)


def say_written(console: Console, file: Path | None, then: str = "") -> None:
    """Report a written file, if one was asked for."""
    if file is not None:
        say(console, f"wrote {file}{then}")


def finish(console: Console, file: Path | None, found: object, show: Callable[[], None]) -> None:
    """Write what was found as JSON, if a file was asked for, and show it even on a full disk."""
    try:
        write_json(file, found)
    finally:
        show()
    say_written(console, file)


def fits(console: Console, made: Table) -> bool:
    """Whether the table fits; a file always has room."""
    return not console.is_terminal or _width(console, made) <= console.width


def table(*headings: str, left: Collection[str] = ()) -> Table:
    """An empty table. Columns are flush right, except those in `left`."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return made


def folding(*headings: str, shown: bool = True) -> Table:
    """An empty table without lines, which folds cells that are too wide."""
    made = Table(box=None, pad_edge=False, header_style="dim", show_header=shown)
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


def show_table(console: Console, made: Table, keys: int = 1) -> None:
    """Print the table, split by columns if it is too wide; each part repeats the first `keys`."""
    first, last = keys, len(made.columns)
    while first < last:
        end = last
        while end > first + 1 and not fits(console, _some(made, keys, first, end)):
            end -= 1
        put(console, _some(made, keys, first, end))
        first = end


def put(console: Console, made: Table) -> None:
    """Print the table whole. A file gets no trailing blanks."""
    if console.is_terminal:
        console.print(made)
        return
    wide = plain(console.file, max(_width(console, made), console.width))
    with wide.capture() as printed:
        wide.print(made)
    for line in printed.get().splitlines():
        say(console, line.rstrip())


def _width(console: Console, made: Table) -> int:
    """The width that the table needs, in characters."""
    options = console.options.update(width=MOST_WIDTH)
    return Measurement.get(console, options, made).maximum


def _some(made: Table, keys: int, first: int, end: int) -> Table:
    part = copy(made)
    chosen = [*made.columns[:keys], *made.columns[first:end]]
    part.columns = [replace(column, _index=index) for index, column in enumerate(chosen)]
    return part
