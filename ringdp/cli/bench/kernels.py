"""`ringdp bench kernels`: every kernel beside torch's ways, against a copy in the same run.

For each size: one round of every way to warm up, then `rounds` times one round of each, in an order
that rotates, so that a slow phase of the machine hits all of them. A round is as many calls as fit
ROUND_SECONDS, timed as one: by events on a GPU, by the clock on a CPU. What must move, over the
time, is a bandwidth; that of `copy_`, which moves 2 S, is the memory's roof as torch reaches it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ringdp.cli.bench.kernel_cases import CASES, OURS, Call
from ringdp.cli.bench.machine import describe
from ringdp.cli.bench.options import MOST_BYTES, Options
from ringdp.cli.console import plain
from ringdp.cli.options import between, check_writable
from ringdp.errors import RingdpError, UsageError

NAME = "kernels"
COPY = "copy_"
ROUND_SECONDS = 0.01
MOST_CALLS = 1000  # in a round


@dataclass(frozen=True)
class Row:
    kernel: str
    way: str  # "ringdp", or torch's
    size: int  # bytes of a float32 buffer
    bytes: int  # that must move
    min_us: float
    p50_us: float
    gb_s: float  # of the median, as the two below
    percent_of_copy: float
    over_ours: float | None  # this way's time over ours; None for ours


@dataclass(frozen=True)
class Report:
    machine: dict[str, str]
    device: str
    rows: list[Row]


def check(options: Options) -> None:
    """Raise UsageError for what cannot be, and for options that only a collective has."""
    defaults = Options(NAME)
    for name in ("ranks", "dtype", "op", "algorithms", "transports", "registered", "peers"):
        if getattr(options, name) != getattr(defaults, name):
            raise UsageError(
                f"--{name.removesuffix('s') if name != 'ranks' else name} is for collectives; "
                "bench kernels takes --min, --max, --factor, --rounds and --json"
            )
    between("--min", options.min, 4, MOST_BYTES)
    between("--max", options.max, options.min, MOST_BYTES)
    between("--factor", options.factor, 2, 1 << 20)
    between("--rounds", options.rounds, 1, 10_000)
    if options.json is not None:
        check_writable(options.json)


def bench(options: Options, console: Console) -> int:
    check(options)
    report = measure(options, lambda says: console.print(says, soft_wrap=True))
    show(report, console)
    if options.json is not None:
        write(options.json, report)
    return 0


def measure(options: Options, note: Callable[[str], None]) -> Report:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = describe(torch.get_num_threads())
    name = torch.cuda.get_device_name() if device.type == "cuda" else machine["cpu"]
    rows: list[Row] = []
    for size in options.sizes:
        note(f"measuring {size:,} bytes on {name}")
        rows += _of_size(size // 4, options.rounds, device)
    return Report(machine, name, rows)


def _of_size(elems: int, rounds: int, device: torch.device) -> list[Row]:
    x, y = torch.randn(2, elems, device=device)
    rows: list[Row] = []
    for kernel, case in CASES.items():
        ways = {COPY: lambda: y.copy_(x)} | case.ways(elems, device)
        times = interleaved(ways, rounds, device)
        copied = 8 * elems / median(times.pop(COPY))
        for way, seconds in times.items():
            p50, moved = median(seconds), case.moves * 4 * elems
            rows.append(
                Row(
                    kernel=kernel,
                    way=way,
                    size=4 * elems,
                    bytes=int(moved),
                    min_us=round(min(seconds) * 1e6, 3),
                    p50_us=round(p50 * 1e6, 3),
                    gb_s=round(moved / p50 / 1e9, 2),
                    percent_of_copy=round(100 * moved / p50 / copied, 1),
                    over_ours=None if way == OURS else round(p50 / median(times[OURS]), 3),
                )
            )
    return rows


def interleaved(ways: dict[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of a call, one of each round."""
    calls = {}
    for way, call in ways.items():
        call()  # compiles, on a GPU
        calls[way] = max(1, min(MOST_CALLS, int(ROUND_SECONDS / timed(call, 1, device))))
    names, found = list(ways), {way: list[float]() for way in ways}
    for turn in range(rounds):
        first = turn % len(names)
        for way in names[first:] + names[:first]:
            found[way].append(timed(ways[way], calls[way], device))
    return found


def timed(call: Call, times: int, device: torch.device) -> float:
    """Seconds of one call, of so many in a row."""
    if device.type == "cuda":
        event = partial(torch.cuda.Event, enable_timing=True)
        begin, end = event(), event()
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def table(report: Report) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("size", "kernel", "way", "µs", "min", "GB/s", "% of copy", "× ours"):
        left = heading in ("kernel", "way")
        made.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for before, row in zip([None, *report.rows], report.rows, strict=False):
        if before is not None and before.size != row.size:
            made.add_section()
        made.add_row(
            f"{row.size:,}",
            row.kernel,
            row.way,
            f"{row.p50_us:,.1f}",
            f"{row.min_us:,.1f}",
            f"{row.gb_s:,.1f}",
            f"{row.percent_of_copy:.0f}",
            "" if row.over_ours is None else f"{row.over_ours:.2f}",
            style="" if row.way == OURS else "dim",
        )
    return made


def show(report: Report, console: Console) -> None:
    if not console.is_terminal:
        console = plain(console.file, max(120, console.width))
    console.print(
        f"\nkernels on {report.device}. A size is that of one float32 buffer, in bytes; µs is the "
        "median of a call; GB/s is what must move over that; a copy of the same size, in turn with "
        "the kernel, is 100 %; × ours is torch's time over ringdp's.",
        soft_wrap=True,
    )
    console.print(table(report))


def write(path: Path, report: Report) -> None:
    try:
        path.write_text(json.dumps(asdict(report), indent=1) + "\n")
    except OSError as error:  # it was writable before
        raise RingdpError(f"ringdp: cannot write {path}: {error.strerror}") from None
