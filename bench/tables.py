"""Tables and sentences about results, for `readme`: predictions, and errors of sums."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from statistics import median

from bench.link import LinkRow
from bench.plan import COLLECTIVES, Run, Timed
from bench.results import load
from ringdp.cli.bench.error import Row
from ringdp.cli.bench.kernel_cases import OURS
from ringdp.cli.bench.kernels import Row as Kernel


def markdown(
    heads: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)
) -> str:
    """A table whose columns are flush right, except those in `left`."""
    rule = "|".join("---" if column in left else "---:" for column in range(len(heads)))
    return "\n".join([_row(heads), f"|{rule}|", *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def bytes_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def cpu_kernels() -> str:
    """From `python -m bench.suite kernels` on a machine without a GPU."""
    rows = [Kernel(**row) for row in load("kernels")["rows"]]
    sizes = sorted({row.size for row in rows})
    lines = []
    for kernel in dict.fromkeys(row.kernel for row in rows):
        cells = []
        for size in sizes:
            here = [r for r in rows if (r.kernel, r.size) == (kernel, size)]
            (ours,) = (r.p50_us for r in here if r.way == OURS)
            least = min(r.over_ours for r in here if r.over_ours is not None)
            cells.append(
                f"{ours:,.3g} ({least:.2f})" if ours < 1000 else f"{ours:,.0f} ({least:.2f})"
            )
        lines.append([kernel, *cells])
    return markdown(["µs (× best of torch)", *map(bytes_text, sizes)], lines)


def link_rows() -> list[LinkRow]:
    return [LinkRow(**row) for row in load("link")["rows"]]


def link() -> str:
    """From `python -m bench.link`."""
    found, rows = load("link")["link"], link_rows()
    ratios = sorted(row.ratio for row in rows)
    ranks = sorted({row.ranks for row in rows})
    return (
        f"Over an emulated link of {1e3 * found['latency']:g} ms and "
        f"{found['bandwidth'] / 1e6:g} MB/s, an `all_reduce` of 64 KiB to 16 MiB on {ranks[0]} to "
        f"{ranks[-1]} ranks, {' or '.join(dict.fromkeys(r.algorithm for r in rows))}, takes "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} times as long as predicted, {median(ratios):.2f} at "
        f"the median of {len(rows)} cases (`bench/link.py`)."
    )


def plan_runs() -> list[Run]:
    return [Run(**run) for run in load("plan")["runs"]]


def plan() -> str:
    """From `python -m bench.plan`."""
    runs = plan_runs()
    assert all(r.held == r.held_predicted and r.sent == r.sent_predicted for r in runs)
    stages = sorted({r.stage for r in runs})
    lines = []
    for ranks, network in dict.fromkeys((r.ranks, r.network) for r in runs):
        row = [r for r in runs if (r.ranks, r.network) == (ranks, network)]
        cells = [
            f"{r.predicted:.0f} / {r.median:.0f} ({r.predicted / r.median - 1:+.0%})" for r in row
        ]
        lines.append([f"{ranks}", network, *cells])
    table = markdown(["ranks", "over", *(f"stage {s}" for s in stages)], lines, left={1})
    began, ended = (load("plan")["machine"][when].split()[0] for when in ("load", "load after"))
    return (
        f"{table}\n\nThe load was {began} when it began and {ended} when it ended. {_collectives()}"
    )


def _collectives() -> str:
    timed = [Timed(**row) for row in load("plan")["collectives"]]
    parts = []
    for name in COLLECTIVES:
        off = sorted(
            t.predicted / t.median - 1 for t in timed if t.collective == name and not t.fitted
        )
        parts.append(f"{off[0]:+.0%} to {off[-1]:+.0%} of `{name}` (median {median(off):+.0%})")
    return f"Of sizes that were not fitted the predictions are off by {', '.join(parts)}."


def error() -> str:
    """From `python -m bench.suite error`."""
    rows = [Row(**row) for row in load("error")]
    rows = [row for row in rows if (row.ranks, row.inputs) == (64, "positive")]
    greatest = {(row.algorithm, row.dtype): row.max for row in rows}
    cells = [
        f"{greatest['direct', dtype]:.2f} by `direct`, {greatest['ring', dtype]:.2f} by the ring "
        f"and {greatest['halving', dtype]:.2f} by `halving` in {dtype}"
        for dtype in ("float32", "bfloat16")
    ]
    return (
        "`ringdp bench error` counts how far sums are from float64's, by algorithm, dtype and "
        f"ranks. Of 64 positive numbers, at most this many ulps: {'; '.join(cells)}."
    )
