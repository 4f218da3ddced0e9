"""A picture of one rank's step: what it did, lane by lane, along the time."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Something that took from `begin` to `end`, in seconds."""

    lane: str
    label: str
    begin: float
    end: float


LANES = {
    "forward": "#4c78a8",
    "backward": "#54a24b",
    "wait": "#e45756",
    "all_gather": "#f2cf5b",
    "reduce_scatter": "#b279a2",
}
WIDTH, HEIGHT, LEFT = 1000.0, 22, 110  # of the time axis, of a row, and of what stands before them
SAYS = (
    "Numbers are blocks, 0 is what lies in none. "
    "A collective lasts from when it is issued until it has been waited for."
)


def timeline(spans: list[Span]) -> str:
    """An SVG: a lane a kind, a bar a unit, in as many rows as there are at once."""
    total = max(s.end for s in spans)
    out, y = [], 4
    for lane, color in LANES.items():
        rows = apart([s for s in spans if s.lane == lane])
        out.append(f'<text x="4" y="{y + 15}">{lane}</text>')
        for row in rows:
            for s in row:
                x, w = LEFT + WIDTH * s.begin / total, max(WIDTH * (s.end - s.begin) / total, 0.3)
                out.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{HEIGHT - 2}" '
                    f'fill="{color}" stroke="#333" stroke-width="0.4"/>'
                )
                if w > 7:
                    out.append(
                        f'<text x="{x + min(3, w / 2 - 3.4):.1f}" y="{y + 15}">{s.label}</text>'
                    )
            y += HEIGHT
        y += 8
    every = next(ms for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if 1e3 * total < 12 * ms)
    ticks = []
    for ms in range(0, int(1e3 * total) + 1, every):
        x = LEFT + WIDTH * ms / 1e3 / total
        ticks.append(f'<path d="M{x:.1f} 0V{y}" stroke="#ccc"/>')
        ticks.append(f'<text x="{x:.1f}" y="{y + 14}" text-anchor="middle">{ms} ms</text>')
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
            f'viewBox="0 0 {WIDTH + LEFT + 20:.0f} {y + 42}">',
            '<rect width="100%" height="100%" fill="#fff"/>',  # on a dark page, too
            *ticks,
            *out,
            f'<text x="{LEFT}" y="{y + 34}">{SAYS}</text>',
            "</svg>",
            "",
        ]
    )


def apart(spans: list[Span]) -> list[list[Span]]:
    """In rows, each span in the first where none before it still lasts."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.begin):
        free = (row for row in rows if row[-1].end <= span.begin)
        row = next(free, None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows
