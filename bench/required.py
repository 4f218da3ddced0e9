"""The speedups that ringdp promises, and those that results of `bench.suite` show.

A ratio is the best peer's time over ringdp's, at one size of the same interleaved run. The worst
size of a case counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ringdp.cli.bench.rows import Report, Row, read

K, M = 1 << 10, 1 << 20


class Required(NamedTuple):
    case: str
    results: str  # a file's name, without .json
    registered: bool
    least: int  # bytes
    most: int
    ratio: float


REQUIRED = (
    Required("all_reduce, 1-64 KiB", "all_reduce", False, K, 64 * K, 1.8),
    Required("all_reduce, 256 KiB-1 MiB", "all_reduce", False, 256 * K, M, 1.4),
    Required("all_reduce, 4-16 MiB", "all_reduce", False, 4 * M, 16 * M, 1.3),
    Required("all_reduce, 64 MiB", "all_reduce", False, 64 * M, 64 * M, 2.0),
    Required("all_reduce, registered, 1-16 MiB", "all_reduce", True, M, 16 * M, 3.5),
    Required("all_reduce, bfloat16, 4-64 MiB, gloo", "all_reduce_bf16", False, 4 * M, 64 * M, 6.0),
    Required("reduce_scatter, 4 KiB-64 MiB", "reduce_scatter", False, 4 * K, 64 * M, 1.2),
    Required("all_gather, registered, 64 KiB-64 MiB", "all_gather", True, 64 * K, 64 * M, 1.2),
    Required("all_reduce, 4 ranks, 1 KiB-64 MiB", "all_reduce_4", False, K, 64 * M, 1.5),
)


class Reached(NamedTuple):
    """The worst ratio, and the size at which it occurs."""

    ratio: float
    size: int


Time = Callable[[Row], float]


median: Time = attrgetter("p50_us")
minimum: Time = attrgetter("min_us")


def reached(required: Required, time: Time, results: Path) -> Reached | None:
    """What a case reaches; None if it has not been measured. `results` may be another machine's."""
    file = results / f"{required.results}.json"
    rows = read(file).rows if file.exists() else []
    rows = [r for r in rows if required.least <= r.bytes <= required.most]
    return _worst([r for r in rows if not r.ours or r.registered == required.registered], time)


def beside_gloo(time: Time, results: Path) -> Reached | None:
    """The worst ratio to gloo over everything measured with private buffers."""
    found = [
        _worst(
            [r for r in report.rows if not r.registered and (r.ours or r.transport == "gloo")], time
        )
        for report in of_suite(results)
    ]
    return min((f for f in found if f is not None), default=None)


def of_suite(results: Path) -> Iterator[Report]:
    for file in sorted(results.glob("*.json")):
        if "contenders" in json.loads(file.read_bytes()):  # else another bench's file
            yield read(file)


def _worst(rows: list[Row], time: Time) -> Reached | None:
    """The worst ratio of ringdp's rows, each compared with the best of the others at its size."""
    ratios = (
        Reached(min(others) / time(row), row.bytes)
        for row in rows
        if row.ours and (others := [time(r) for r in rows if r.bytes == row.bytes and not r.ours])
    )
    return min(ratios, default=None)
