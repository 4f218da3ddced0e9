"""Drawings of a schedule: a text grid and an SVG. Used by errors, the README and the docs."""

from __future__ import annotations

from math import cos, pi, sin

from ringdp.schedule.ir import Schedule, Transfer


def grid(schedule: Schedule, *, here: tuple[int, Transfer] | None = None) -> str:
    """One line a round: `src.chunk +> dst.chunk` for a reduce, `->` for a copy.

    `here` marks one (round, transfer) with `<-- here`. More than 16 transfers a round are cut.
    """
    lines = []
    for r, transfers in enumerate(schedule.rounds):
        shown = [str(t) for t in transfers[:16]]
        if len(transfers) > len(shown):
            shown.append(f"... {len(transfers) - len(shown)} more")
        lines.append(f"round {r}: " + "  ".join(shown))
        if here and here[0] == r:
            lines.append(f"         {here[1]}  <-- here")
    return "\n".join(lines)


def svg(schedule: Schedule, *, columns: int = 3, size: int = 190) -> str:
    """One panel a round, ranks on a circle; an arrow carries the chunk that moves.

    Reduces are solid, copies dashed; the colour is the chunk's. Local transfers are not drawn.
    """
    rows = -(-len(schedule.rounds) // columns)
    body = [
        f'<g transform="translate({size * (r % columns)},{(size + 20) * (r // columns)})">'
        + _panel(schedule, r, size)
        + "</g>"
        for r in range(len(schedule.rounds))
    ]
    heads = "".join(
        f'<marker id="a{c}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{_colour(schedule, c)}"/></marker>'
        for c in range(schedule.chunks)
    )
    width, height = size * min(columns, len(schedule.rounds)), (size + 20) * rows
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" text-anchor="middle">'
        f'<rect width="{width}" height="{height}" fill="#fff"/><defs>{heads}</defs>'
        + "\n".join(body)
        + "</svg>\n"
    )


def _panel(schedule: Schedule, r: int, size: int) -> str:
    centre, radius, dot = size / 2, size * 0.33, 15

    def place(rank: int, reach: float = radius) -> tuple[float, float]:
        angle = 2 * pi * rank / schedule.ranks - pi / 2
        return centre + reach * cos(angle), centre + 14 + reach * sin(angle)

    out = [f'<text x="{centre}" y="18" fill="#555">round {r}</text>']
    for t in schedule.rounds[r]:
        if t.src == t.dst:
            continue
        (x0, y0), (x1, y1) = place(t.src), place(t.dst)
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length * (dot + 2), (y1 - y0) / length * (dot + 2)
        # An arrow bends to its left, so that the two directions between a pair stay apart.
        bend = 0.16
        mx, my = (x0 + x1) / 2 + (y1 - y0) * bend, (y0 + y1) / 2 - (x1 - x0) * bend
        colour = _colour(schedule, t.write)
        dash = "" if t.reduce else ' stroke-dasharray="5 3"'
        out.append(
            f'<path d="M{x0 + ux:.1f} {y0 + uy:.1f}Q{mx:.1f} {my:.1f} {x1 - ux:.1f} {y1 - uy:.1f}" '
            f'fill="none" stroke="{colour}" stroke-width="2"{dash} marker-end="url(#a{t.write})"/>'
            f'<text x="{mx:.1f}" y="{my + 4:.1f}" fill="{colour}" stroke="#fff" stroke-width="4" '
            f'paint-order="stroke">{t.read}</text>'
        )
    for rank in range(schedule.ranks):
        x, y = place(rank)
        out.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{dot}" fill="#eef1f5" stroke="#445"/>'
            f'<text x="{x:.1f}" y="{y + 4.5:.1f}" fill="#223">{rank}</text>'
        )
    return "".join(out)


def _colour(schedule: Schedule, chunk: int) -> str:
    """Evenly spread hues, one a chunk; scratch wears its source's place in the circle."""
    return f"hsl({360 * (chunk % schedule.chunks) // schedule.chunks},70%,38%)"
