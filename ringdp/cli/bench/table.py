"""The table at the end of `ringdp bench`: nccl-tests' columns, prediction, bound, and peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ringdp.cli.bench.cases import CASES, itemsize
from ringdp.cli.bench.options import Options
from ringdp.cli.bench.rows import Report, Row, best_peer
from ringdp.cli.console import counted, fits, say, show_table, table

NOTHING = "-"


class Column(NamedTuple):
    heading: str
    cell: Callable[[Row], str]
    spare: int = 0  # a narrow console drops the columns with the highest number first


def columns(rows: Sequence[Row], op: str) -> list[Column]:
    """Those in which a row says something."""
    transports = {r.transport for r in rows if r.ours}
    found = [
        Column("bytes", lambda r: f"{r.bytes:,}"),
        Column("count", lambda r: f"{r.bytes // itemsize(r.dtype):,}", spare=3),
        Column("type", lambda r: r.dtype, spare=3),
        Column("redop", lambda r: op if CASES[r.collective].reduces else NOTHING, spare=3),
        Column("algorithm", lambda r: r.label),
        *([Column("transport", lambda r: r.transport)] if len(transports) > 1 else []),
        Column("p50 µs", lambda r: _us(r.p50_us)),
        Column("min", lambda r: _us(r.min_us), spare=3),
        Column("p20", lambda r: _us(r.p20_us), spare=3),
        Column("p80", lambda r: _us(r.p80_us), spare=3),
        Column("algbw", lambda r: f"{r.algbw:.2f}", spare=3),
        Column("busbw", lambda r: f"{r.busbw:.2f}"),
        Column("#wrong", lambda r: f"{r.wrong:,}", spare=2),  # also reported below the table
        Column("predicted", lambda r: _us(r.predicted_us)),
        Column("bound", lambda r: _us(r.bound_us), spare=1),
        Column("%", lambda r: f"{100 * r.bound_us / r.p50_us:.0f}" if r.bound_us else NOTHING),
    ]
    if any(not r.ours for r in rows):
        found.append(Column("× peer", lambda r: _ratio(rows, r)))
    return [column for column in found if any(column.cell(row) != NOTHING for row in rows)]


def _us(value: float | None) -> str:
    if value is None:
        return NOTHING
    decimals = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{decimals}f}"


def _ratio(rows: Sequence[Row], row: Row) -> str:
    peer = best_peer(rows, row)
    return NOTHING if peer is None or not row.ours else f"{peer.p50_us / row.p50_us:.2f}"


def rows_shown(rows: Sequence[Row], op: str, most: int) -> Table:
    """The table without columns whose `spare` exceeds `most`."""
    shown = [c for c in columns(rows, op) if c.spare <= most]
    made = table(*(c.heading for c in shown), left=("algorithm", "transport", "type", "redop"))
    groups = len(rows) > len({row.bytes for row in rows})
    for before, row in zip([None, *rows], rows, strict=False):
        if groups and before is not None and before.bytes != row.bytes:
            made.add_section()
        made.add_row(*(column.cell(row) for column in shown), style="" if row.ours else "dim")
    return made


def show(console: Console, report: Report, options: Options) -> None:
    """Print the table. A narrow terminal gets the columns that matter most; a file gets all."""
    rows = report.rows
    tables = [rows_shown(rows, options.op, most) for most in (3, 2, 1, 0)]
    first = rows[0]
    calls = " to ".join(f"{n:,}" for n in sorted({f(r.calls for r in rows) for f in (min, max)}))
    pinned = "" if options.pin else ", not pinned"
    columns = [column.header for column in tables[-1].columns]
    explained = "".join(
        says
        for heading, says in (
            ("predicted", "; predicted by α β γ fitted to these medians"),
            ("%", "; % of the physical bound"),
            ("× peer", "; × peer is the best peer's median over ours"),
        )
        if heading in columns
    )
    say(
        console,
        f"\n{first.collective}, {first.ranks} ranks on {report.machine['cores']} cores "
        f"({report.machine['cpu']}){pinned}, {first.dtype}. Times are the slowest rank's, in µs, "
        f"of {calls} calls in {counted(options.rounds, 'round')}, in which all take turns; "
        f"bandwidths in GB/s{explained}.",
    )
    fitting = (made for made in tables if fits(console, made))
    show_table(console, next(fitting, tables[-1]), columns.index("p50 µs"))
    if beaten := [f"{r.label} at {r.bytes:,} bytes" for r in rows if r.beats_bound]:
        say(console, f"Faster than the bound at its best: {', '.join(beaten)}.")
    for row in rows:
        if row.wrong:
            says = f"WRONG: {row.label} at {row.bytes:,} bytes: {row.wrong:,} elements"
            say(console, says, "bold red")
