"""What a benchmark of a collective writes: one row per (algorithm, size).

algbw = bytes / time. busbw = algbw x the share of the buffer that every rank must send, 2(n-1)/n
for all_reduce and (n-1)/n for the others, as nccl-tests define them: it can be held against a
link's speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np

from ringdp.schedule import Collective
from ringdp.schedule.cost import CLOSED, Machine, Price, closed, fit, seconds


@dataclass(frozen=True)
class Row:
    collective: str
    algorithm: str
    transport: str
    ranks: int
    bytes: int
    dtype: str
    min_us: float
    p20_us: float
    p50_us: float
    p80_us: float
    algbw: float  # GB/s, from the median
    busbw: float
    wrong: int  # elements

    @classmethod
    def measured(
        cls,
        what: tuple[str, str, str],
        ranks: int,
        size: int,
        dtype: str,
        seconds: Sequence[float],
        wrong: int,
    ) -> Row:
        """From the times of single calls, the slowest rank's of each."""
        collective, algorithm, transport = what
        us = np.array(seconds) * 1e6
        p20, p50, p80 = (round(float(np.percentile(us, p)), 2) for p in (20, 50, 80))
        algbw = size / p50 / 1e3
        share = (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
        speeds = round(algbw, 3), round(algbw * share, 3)
        least = round(float(us.min()), 2)
        return cls(
            collective,
            algorithm,
            transport,
            ranks,
            size,
            dtype,
            least,
            p20,
            p50,
            p80,
            *speeds,
            wrong,
        )


def fitted(rows: Iterable[Row]) -> Machine:
    """α, β, γ and the bus that explain the medians of our own algorithms' rows best."""
    ours = [r for r in rows if (r.collective, r.algorithm) in CLOSED]
    return fit((_price(r), r.bytes, r.p50_us / 1e6) for r in ours)


def predicted_us(row: Row, machine: Machine) -> float | None:
    """What the cost model says; None for what it does not know."""
    if (row.collective, row.algorithm) not in CLOSED:
        return None
    return seconds(_price(row), machine, row.bytes) * 1e6


def _price(row: Row) -> Price:
    return closed(cast(Collective, row.collective), row.algorithm, row.ranks)


def write(path: Path, rows: Iterable[Row]) -> None:
    path.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


def read(path: Path) -> list[Row]:
    return [Row(**r) for r in json.loads(path.read_text())]
