"""`ringdp bench kernels`: every kernel beside torch's ways, compared with a copy in the same run.

For each size, every way has one warm-up round, then `rounds` rounds in turn with the others. The
order rotates, so that a slow phase of the machine hits all of them. A round is as many calls as fit
ROUND_SECONDS, timed as one: by events on a GPU, by the clock on a CPU. It therefore includes what
the host needs for launches, as in a training step. From ALONE bytes on, a GPU's own time is taken:
each call is timed by itself, starts with cold caches, and is launched while the GPU is kept busy.

The bandwidth is the bytes that must move, divided by the time. 100 % is a `copy_` that moves as
many bytes, so that both spend the same share of their time on starting: on an H200, where an empty
kernel takes 3 µs, copies that move 64, 128, 512 and 1920 MiB reach 3.7, 4.0, 4.3 and 4.3 TB/s
[measured]. The largest size comes first, and the file is written after every kernel, so that an
aborted run has what matters most. A way that raises, as torch's private functions may in another
version, loses only its own row: its error is kept and reported at the end, with exit code 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ringdp.cli.bench.kernel_cases import CASES, OURS, Call
from ringdp.cli.bench.machine import describe
from ringdp.cli.bench.options import Options, check_sizes, only
from ringdp.cli.checks import check_writable
from ringdp.cli.console import finish, say, show_table, table
from ringdp.cli.files import keep_json

COPY = "copy_"
ROUND_SECONDS = 0.01
MOST_CALLS = 1000  # in a round
ALONE = 64 << 20  # bytes of a buffer
ALONE_CALLS = 10  # in a round: their launches must all fit the device's queue of about 1000
EVICTING = 256 << 20  # bytes to read: several times any GPU's cache
LAUNCH_CYCLES = 1_000_000  # of the device, about 0.5 ms: time for a call's launches, up to 70


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
    over_ours: float | None  # this way's time over ours; None for ours, or if ours failed


@dataclass(frozen=True)
class Failure:
    kernel: str
    way: str
    size: int
    error: str


@dataclass(frozen=True)
class Report:
    machine: dict[str, str]
    device: str
    rows: list[Row]
    failures: list[Failure] = field(default_factory=list)


def check(options: Options) -> None:
    """Raise UsageError for bad values, and for options that apply only to collectives."""
    only(
        options,
        ("min", "max", "factor", "rounds", "json"),
        "for collectives; bench kernels takes --min, --max, --factor, --rounds and --json",
    )
    check_sizes(options, least=4)
    check_writable(options.json)


def bench(options: Options, console: Console) -> int:
    check(options)
    report = measure(options, console)
    finish(console, options.json, report, lambda: show(report, console))
    return 1 if report.failures else 0


def measure(options: Options, console: Console) -> Report:
    """Measure all kernels. The file is written after every kernel."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = describe(torch.get_num_threads())
    name = torch.cuda.get_device_name() if device.type == "cuda" else machine["cpu"]
    report = Report(machine, name, [])
    for size in reversed(options.sizes):
        say(console, f"measuring {size:,} bytes on {name}")
        for kernel, case in CASES.items():
            try:
                ways = {COPY: copy_of(case.moves, size // 4, device)}
                ways |= case.ways(size // 4, device)
                times, failed = interleaved(ways, options.rounds, timer_of(size, device))
            except Exception as e:  # other kernels' tensors may fit
                times, failed = {}, {"its tensors": _text(e)}
            ways = {}  # frees its tensors
            if COPY in times:
                report.rows.extend(_rows(kernel, size, times))
            report.failures.extend(Failure(kernel, w, size, why) for w, why in failed.items())
            keep_json(options.json, report)
    return report


def copy_of(moves: float, elems: int, device: torch.device) -> Call:
    """A copy that moves as many bytes as a kernel that moves `moves` buffers of float32[elems]."""
    x = torch.randn(max(1, int(moves * elems / 2)), device=device)
    return partial(torch.empty_like(x).copy_, x)


def _rows(kernel: str, size: int, times: dict[str, list[float]]) -> list[Row]:
    moved = CASES[kernel].moves * size
    copied = median(times[COPY])
    rows = []
    for way, seconds in times.items():
        if way == COPY:
            continue
        p50 = median(seconds)
        beside = way != OURS and OURS in times
        rows.append(
            Row(
                kernel=kernel,
                way=way,
                size=size,
                bytes=int(moved),
                min_us=round(min(seconds) * 1e6, 3),
                p50_us=round(p50 * 1e6, 3),
                gb_s=round(moved / p50 / 1e9, 2),
                percent_of_copy=round(100 * copied / p50, 1),
                over_ours=round(p50 / median(times[OURS]), 3) if beside else None,
            )
        )
    return rows


def _text(error: Exception) -> str:
    """The error as text: an exception would keep the tensors of its frames alive."""
    return f"{type(error).__name__}: {error}"


class Timer(NamedTuple):
    """`timed(call, times)` makes that many calls and returns the seconds per call."""

    timed: Callable[[Call, int], float]
    most: int  # calls in a round


def timer_of(size: int, device: torch.device) -> Timer:
    """How to time calls on buffers of `size` bytes."""
    if device.type != "cuda":
        return Timer(by_the_clock, MOST_CALLS)
    if size < ALONE:
        return Timer(by_events, MOST_CALLS)
    evicting = torch.zeros(EVICTING // 4, device=device)
    return Timer(partial(alone, evicting=evicting), ALONE_CALLS)


def interleaved(
    ways: dict[str, Call], rounds: int, timer: Timer
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the seconds per call of each round by way, and the errors of ways that raised."""
    calls, found = dict[str, int](), dict[str, list[float]]()
    failed = dict[str, str]()

    def turn(way: str) -> None:
        try:
            if way not in found:
                ways[way]()  # compiles, on a GPU
                calls[way] = max(1, min(timer.most, int(ROUND_SECONDS / timer.timed(ways[way], 1))))
                found[way] = []
            else:
                found[way].append(timer.timed(ways[way], calls[way]))
        except Exception as e:
            failed[way] = _text(e)
            found.pop(way, None)

    for way in ways:
        turn(way)
    for number in range(rounds):
        names = list(found)
        first = number % max(1, len(names))
        for way in names[first:] + names[:first]:
            turn(way)
    return found, failed


def by_the_clock(call: Call, times: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def by_events(call: Call, times: int) -> float:
    begin, end = _event(), _event()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def alone(call: Call, times: int, evicting: Tensor) -> float:
    """Seconds per call, each with cold caches.

    The caches are flushed by reading: written data would be written back during the call.
    """
    marks = [(_event(), _event()) for _ in range(times)]
    torch.cuda._sleep(times * LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
    for begin, end in marks:
        evicting.sum()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sum(float(begin.elapsed_time(end)) for begin, end in marks) / 1e3 / times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


KEYS = ("size", "kernel", "way")  # columns


def rows_shown(report: Report) -> Table:
    made = table(*KEYS, "µs", "min", "GB/s", "% of copy", "× ours", left=KEYS[1:])
    for size in sorted({row.size for row in report.rows}):
        made.add_section()
        for row in (row for row in report.rows if row.size == size):
            made.add_row(
                f"{size:,}",
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
    say(
        console,
        f"\nkernels on {report.device}. A size is that of one float32 buffer, in bytes; µs is the "
        "median of a call, for large sizes on a GPU of the GPU's time; GB/s is what must move over "
        "that; 100 % is a copy, in turn with the kernel, that moves as many bytes; × ours is "
        "torch's time over ringdp's.",
    )
    show_table(console, rows_shown(report), len(KEYS))
    for failure in report.failures:
        where = f"{failure.kernel}, {failure.way}, {failure.size:,} bytes"
        say(console, f"{where}: {failure.error}", "red")
