"""The spans of one rank's step, by lane."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """Something that lasted from `begin` to `end`, in ms."""

    lane: str
    label: str
    begin: float
    end: float


def apart(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over rows without overlap: each goes to the first row that is free."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.begin):
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows
