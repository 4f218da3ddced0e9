"""Drawings of a schedule: a text grid and an SVG. Used by errors, the README and the docs."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable
from colorsys import hls_to_rgb
from math import cos, pi, sin

from ringdp.schedule.ir import Schedule, Transfer

WIDTH = 80  # columns of text
MOST_A_ROUND = 16  # transfers that the grid shows per round, unless it is to be whole
AROUND = 3  # rounds that the grid shows before and after the marked one


def grid(
    schedule: Schedule, *, here: tuple[int, Transfer] | None = None, whole: bool = False
) -> str:
    """Draw one line per round, `src.chunk +> dst.chunk` for a reduce and `->` for a copy.

    Lines have at most 80 columns. `here` marks one (round, transfer) with `<-- here` and omits the
    rounds far from it. At most 16 transfers of a round are shown, unless `whole`.
    """
    first = max(0, here[0] - AROUND) if here else 0
    last = here[0] + AROUND + 1 if here else len(schedule.rounds)
    lines = [f"... {first} round{'s' * (first > 1)} before"] if first else []
    for r, transfers in list(enumerate(schedule.rounds))[first:last]:
        lines += _line(r, transfers, len(transfers) if whole else MOST_A_ROUND)
        if here and here[0] == r:
            lines.append(f"{'':9}{here[1]}  <-- here")
    if (rest := len(schedule.rounds) - last) > 0:
        lines.append(f"... {rest} round{'s' * (rest > 1)} after")
    return "\n".join(lines)


def _line(r: int, transfers: tuple[Transfer, ...], most: int) -> list[str]:
    # textwrap must not break a transfer: its spaces are replaced and restored below.
    words = [str(t).replace(" ", "\0") for t in transfers[:most]]
    if len(transfers) > len(words):
        words.append(f"...\0{len(transfers) - len(words)}\0more")
    head = f"round {r}: "
    wrapped = textwrap.wrap(
        "  ".join(words),
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in wrapped] or [head.rstrip()]


def svg(schedule: Schedule, *, columns: int = 3) -> str:
    """Draw one panel per round: ranks on a circle, and arrows labelled with the chunks that move.

    Reduces are solid and copies dashed; the colour is that of the first chunk. A local transfer is
    a loop at its rank. For legibility a panel with more than three arrows per rank has no labels,
    and all arrows but rank 0's are pale.
    """
    radius = max(62.0, 32 / sin(pi / max(2, schedule.ranks)))
    loops = any(t.src == t.dst for transfers in schedule.rounds for t in transfers)
    size = round(2 * radius) + (90 if loops else 78)
    panels = [_panel(r, schedule, radius, size) for r in range(len(schedule.rounds))]
    columns = max(1, min(columns, len(panels)))
    width, height = size * columns, (size + 20) * max(1, -(-len(panels) // columns))
    body = "\n".join(
        f'<g transform="translate({size * (r % columns)},{(size + 20) * (r // columns)})">{p}</g>'
        for r, p in enumerate(panels)
    )
    heads = "".join(
        f'<marker id="a{c}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour(c, schedule.chunks)}"/></marker>'
        for c in range(schedule.chunks)
    )
    nothing = f'<text x="{width / 2:.0f}" y="{height / 2:.0f}" fill="#555">nothing moves</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" text-anchor="middle">'
        f'<rect width="{width}" height="{height}" fill="#fff"/><defs>{heads}</defs>'
        f"{body or nothing}</svg>\n"
    )


def colour(chunk: int, chunks: int) -> str:
    """Return the chunk's colour. Hues are evenly spread; light ones are darkened to be legible."""
    hue = 360 * chunk // chunks
    red, green, blue = (x**2.2 for x in hls_to_rgb(hue / 360, 0.38, 0.7))
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue  # relative luminance (WCAG)
    return f"hsl({hue},70%,{38 * min(1.0, (0.17 / light) ** (1 / 2.2)):.0f}%)"


def _panel(r: int, schedule: Schedule, radius: float, size: int) -> str:
    arrows: dict[tuple[int, int, bool], list[Transfer]] = defaultdict(list)
    for t in schedule.rounds[r]:
        arrows[t.src, t.dst, t.reduce].append(t)
    labels = len(arrows) <= 3 * schedule.ranks
    title = f"round {r}" if labels else f"round {r}, rank 0's arrows in front"
    out = [f'<text x="{size / 2:.0f}" y="18" fill="#555">{title}</text>']
    out.append(f'<g transform="translate({size / 2:.0f},{size / 2 + 16:.0f})">')
    back_to_front = sorted(arrows.values(), key=lambda ts: not labels and ts[0].src == 0)
    drawn = [_arrow(transfers, schedule, radius, labels=labels) for transfers in back_to_front]
    out += [path for path, _ in drawn]
    for rank in range(schedule.ranks):
        x, y = _place(rank, schedule.ranks, radius)
        out.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="15" fill="#eef1f5" stroke="#445"/>'
            f'<text x="{x:.1f}" y="{y + 4.5:.1f}" fill="#223">{rank}</text>'
        )
    return "".join([*out, *(label for _, label in drawn), "</g>"])


def _place(rank: int, ranks: int, reach: float) -> tuple[float, float]:
    angle = 2 * pi * rank / ranks - pi / 2
    return reach * cos(angle), reach * sin(angle)


def _arrow(
    transfers: list[Transfer], schedule: Schedule, radius: float, *, labels: bool
) -> tuple[str, str]:
    """Draw the arrow and the label for all reduces, or all copies, from one rank to another."""
    first, chunks = transfers[0], ranges(t.read for t in transfers)
    x0, y0 = _place(first.src, schedule.ranks, radius)
    if first.src == first.dst:
        path, at = _loop(x0, y0, radius)
    else:
        near = (first.src - first.dst) % schedule.ranks in (1, schedule.ranks - 1)
        place = _place(first.dst, schedule.ranks, radius)
        path, at = _bow(x0, y0, *place, near=near, wide=len(chunks) > 2)
    # Scratch has no colour: it takes that of the chunk at the other end.
    chunk = (first.read if first.read < schedule.chunks else first.write) % schedule.chunks
    dash = "" if first.reduce else ' stroke-dasharray="5 3"'
    stroke = colour(chunk, schedule.chunks)
    label = (
        f'<text x="{at[0]:.1f}" y="{at[1] + 4:.1f}" fill="{stroke}" stroke="#fff" stroke-width="4" '
        f'paint-order="stroke">{chunks}</text>'
    )
    pale = "" if labels or first.src in (0, first.dst) else ' opacity="0.12"'
    line = (
        f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="2"{dash}{pale} '
        f'marker-end="url(#a{chunk})"/>'
    )
    return line, label if labels and first.src != first.dst else ""


def _bow(
    x0: float, y0: float, x1: float, y1: float, *, near: bool, wide: bool
) -> tuple[str, tuple[float, float]]:
    """Return the path from circle to circle and the label's position.

    The path is bent, so that the two directions of a pair do not overlap.
    """
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    ux, uy = (x1 - x0) / length * 17, (y1 - y0) / length * 17
    # Neighbours bend to the left; others bend inwards in both directions, one of them more.
    turn = x0 * y1 - y0 * x1  # > 0 if left is outwards
    bend = 0.16 if near else 0.08 if abs(turn) < 1 else -0.04 if turn > 0 else 0.2
    mx, my = (x0 + x1) / 2 + (y1 - y0) * bend, (y0 + y1) / 2 - (x1 - x0) * bend
    path = f"M{x0 + ux:.1f} {y0 + uy:.1f}Q{mx:.1f} {my:.1f} {x1 - ux:.1f} {y1 - uy:.1f}"
    if near:
        aside = 0.2 if wide and turn > 1 else 0.0  # outside the circle, clear of the arrow
        return path, (mx + (y1 - y0) * aside, my - (x1 - x0) * aside)
    # Other arrows cross in the middle, so their labels are nearer to the source.
    s, m, d = 0.68**2, 2 * 0.68 * 0.32, 0.32**2  # the point of the curve at 0.32
    return path, (s * (x0 + ux) + m * mx + d * (x1 - ux), s * (y0 + uy) + m * my + d * (y1 - uy))


def _loop(x: float, y: float, radius: float) -> tuple[str, tuple[float, float]]:
    """Return the path of a loop on the outer side of a rank, and the label's position."""
    ux, uy = x / radius, y / radius

    def point(out: float, aside: float) -> str:
        return f"{x + ux * out - uy * aside:.1f} {y + uy * out + ux * aside:.1f}"

    return f"M{point(14, -8)}C{point(34, -14)} {point(34, 14)} {point(16, 8)}", (x, y)


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: 0, 1, 2 and 5 are `0-2,5`."""
    parts: list[list[int]] = []
    for x in sorted(set(numbers)):
        if parts and x == parts[-1][-1] + 1:
            parts[-1].append(x)
        else:
            parts.append([x])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
