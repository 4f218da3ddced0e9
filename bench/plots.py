"""Plots results: busbw by size with prediction and bound, and a step.

Needs matplotlib (the extra `plot`). Equal results give files that are equal byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator

from bench.results import RESULTS, load
from bench.zero_step import Span, apart
from ringdp.cli.bench.rows import Report, Row, read

mpl.rcParams.update({"svg.hashsalt": "ringdp", "svg.fonttype": "none", "font.size": 10.5})
INK, GRID = "#333333", "#dddddd"
OURS = ("#b5179e", "#1d6fd1", "#d9480f", "#2b8a3e", "#6741d9", "#0b7285")
PEERS = {"gloo": "#adb5bd", "mpich": "#868e96", "openmpi": "#495057"}
BOUND_FROM = 16 << 10  # bytes: for less the bound, which ignores latency, would squeeze the rest
INCHES = (7, 4.5)
LANES = {
    "forward": "#4c78a8",
    "backward": "#54a24b",
    "wait": "#e45756",
    "all_gather": "#f2cf5b",
    "reduce_scatter": "#b279a2",
}
LABELLED = 0.007  # share of the whole time from which a bar has room for its label
SAYS = (
    "ms. Numbers are blocks, 0 is what lies in none. "
    "A collective lasts from when it is issued until it has been waited for."
)
Value = Callable[[Row], float | None]


def bandwidth(report: Report) -> Figure:
    """busbw by size: ringdp's measured, predicted and bound, and the peers'."""
    rows = report.rows
    figure, axes = _axes(rows)
    for label, color in zip(dict.fromkeys(r.label for r in rows if r.ours), OURS, strict=False):
        mine = [r for r in rows if r.ours and r.label == label]
        _line(axes, mine, lambda r: r.busbw, label=_name(mine[0]), color=color, marker="o", lw=2.2)
        _line(axes, mine, _at(lambda r: r.predicted_us), color=color, ls="--", lw=1.2)
        large = [r for r in mine if r.bytes >= BOUND_FROM]
        _line(axes, large, _at(lambda r: r.bound_us), color=color, ls=":", lw=1.8)
    for peer, color in PEERS.items():
        theirs = [r for r in rows if r.transport == peer]
        if theirs:
            _line(axes, theirs, lambda r: r.busbw, label=peer, color=color, marker=".", lw=1.4)
    for name, style in {"measured": "-", "predicted": "--", "bound": ":"}.items():
        axes.plot([], [], label=name, color=INK, ls=style, lw=1.4)
    axes.legend(frameon=False, fontsize=10, loc="upper left", bbox_to_anchor=(1.01, 1.02))
    return figure


def step(spans: Sequence[Span]) -> Figure:
    """A step: a lane per kind and a bar per unit, in as many rows as overlap."""
    figure = Figure(figsize=(11, 2.6))
    axes = figure.subplots()
    total, y, places = max(s.end for s in spans), 0.0, []
    for lane, color in LANES.items():
        places.append(y + 0.5)
        for row in apart(s for s in spans if s.lane == lane):
            bars = [(s.begin, s.end - s.begin) for s in row]
            axes.broken_barh(bars, (y, 0.9), facecolors=color, edgecolor=INK, lw=0.4)
            for s in row:
                if s.end - s.begin > LABELLED * total:
                    middle = (s.begin + s.end) / 2
                    axes.text(middle, y + 0.5, s.label, ha="center", va="center", fontsize=9)
            y += 1
        y += 0.4
    axes.set_yticks(places, list(LANES))
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, total)
    axes.set_ylim(y, 0)
    axes.set_xlabel(SAYS, fontsize=10)
    axes.grid(axis="x", color=GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def _axes(rows: Sequence[Row]) -> tuple[Figure, Axes]:
    figure, first = Figure(figsize=INCHES), rows[0]
    axes = figure.subplots()
    title = f"{first.collective}, {first.ranks} ranks, {first.dtype}"
    axes.set_title(title, loc="left", color=INK, fontsize=12)
    axes.set_xscale("log", base=2)
    sizes = sorted({r.bytes for r in rows})
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_major_formatter(FixedFormatter([_bytes(s) for s in sizes]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("bytes")
    axes.set_ylabel("busbw, GB/s")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(color=GRID, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _line(axes: Axes, rows: Sequence[Row], value: Value, **style: object) -> None:
    axes.plot([r.bytes for r in rows], [value(r) for r in rows], **style)


def _at(time: Value) -> Value:
    """The busbw of a call that takes `time` µs."""
    return lambda r: r.busbw * r.p50_us / (time(r) or 1)


def _name(row: Row) -> str:
    return (
        "ringdp"
        + ("" if row.algorithm == "auto" else f" {row.algorithm}")
        + (", registered" if row.registered else "")
    )


def _bytes(size: int) -> str:
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if size >= unit:
            return f"{size / unit:g}{name}"
    return str(size)


def write(names: Iterable[str]) -> None:
    """Write the drawing of a step, and results/NAME.svg for each results/NAME.json."""
    save(step([Span(*span) for span in load("zero_step")["spans"]]), RESULTS / "zero_step.svg")
    for name in names:
        save(bandwidth(read(RESULTS / f"{name}.json")), RESULTS / f"{name}.svg")
