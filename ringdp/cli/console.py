"""Consoles that print text as it is: no path becomes markup, a color or an emoji; and tables."""

from collections.abc import Collection
from typing import IO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MOST_WIDTH = 10_000  # characters: no terminal is wider


def plain(file: IO[str] | None = None, width: int | None = None) -> Console:
    """On `file`, else on standard output."""
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def wide_enough(console: Console, width: int) -> Console:
    """A file has room for so many characters; a terminal has what it has."""
    return console if console.is_terminal else plain(console.file, max(width, console.width))


def width_of(console: Console, made: Table) -> int:
    """Characters that it needs."""
    options = console.options.update(width=MOST_WIDTH)
    return Measurement.get(console, options, made).maximum


def table(*headings: str, left: Collection[str] = ()) -> Table:
    """Without rows. Columns are flush right, but for those of `left`."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return made
