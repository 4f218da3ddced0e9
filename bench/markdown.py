"""Makes Markdown tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def markdown(
    heads: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)
) -> str:
    """A table whose columns are flush right, except those in `left`."""
    rule = "|".join("---" if column in left else "---:" for column in range(len(heads)))
    return "\n".join([_row(heads), f"|{rule}|", *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
