"""Consoles that print text as it is: no path becomes markup, a color or an emoji."""

from typing import IO

from rich.console import Console


def plain(file: IO[str] | None = None, width: int | None = None) -> Console:
    """On `file`, else on standard output."""
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)
