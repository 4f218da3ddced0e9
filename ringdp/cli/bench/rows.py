"""The files that `ringdp bench` writes: one row per (contender, size), and the machine.

algbw = S / median time; busbw as nccl-tests define it (`cases`). `predicted_us` is what the α-β-γ
model predicts after a fit to the medians of the same run: it shows how well the model explains
them, and where it does not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ringdp.cli.bench.cases import CASES, EVEN, Task
from ringdp.comm.rendezvous import TRANSPORTS
from ringdp.errors import UsageError
from ringdp.schedule import Collective, proved
from ringdp.schedule.cost import CLOSED, Machine, Price, closed, fit, price, seconds

LIBRARYS = "nccl"  # the algorithm name for NCCL's own collectives
DEFAULT = "direct"  # the algorithm whose price "auto" has
MOST, MOST_RANKS, LEAST_US = 1e18, 1 << 16, 1e-6  # limits for a file's numbers


@dataclass(frozen=True)
class Row:
    collective: str
    algorithm: str
    transport: str  # ringdp's, or the name of a peer
    registered: bool
    ranks: int
    bytes: int
    dtype: str
    min_us: float
    p20_us: float
    p50_us: float
    p80_us: float
    algbw: float  # GB/s
    busbw: float
    predicted_us: float | None  # None for uneven parts, `send`, and other libraries' algorithms
    bound_us: float | None  # None on a GPU
    wrong: int  # elements
    calls: int = 0  # timed calls of all rounds; 0 in files that predate this field

    @property
    def ours(self) -> bool:
        return self.transport in TRANSPORTS

    @property
    def modelled(self) -> bool:
        return self.ours and self.algorithm != LIBRARYS and self.collective in EVEN

    @property
    def built_in(self) -> bool:
        """Whether its price has a closed form.

        Pricing any other algorithm would run a file that the row names, or a proof that may take
        hours.
        """
        return self.modelled and (self.collective, named(self.algorithm)) in CLOSED

    @property
    def beats_bound(self) -> bool:
        return self.bound_us is not None and self.min_us < self.bound_us

    @property
    def label(self) -> str:
        return self.algorithm + (" reg" if self.registered else "")


def measured(
    task: Task,
    transport: str,
    ranks: int,
    times: Sequence[float],  # s, of single calls
    bound: float | None,  # s
    wrong: int,
) -> Row:
    case = CASES[task.collective]
    us = np.array(times) * 1e6 / (ranks if case.lap else 1)
    least, p20, p50, p80 = (round(float(x), 3) for x in np.percentile(us, (0, 20, 50, 80)))
    algbw = task.size / p50 / 1e3
    return Row(
        collective=task.collective,
        algorithm=task.algorithm,
        transport=transport,
        registered=task.registered,
        ranks=ranks,
        bytes=task.size,
        dtype=task.dtype,
        min_us=least,
        p20_us=p20,
        p50_us=p50,
        p80_us=p80,
        algbw=float(f"{algbw:.4g}"),
        busbw=float(f"{algbw * case.bus(ranks):.4g}"),
        predicted_us=None,
        bound_us=None if bound is None else round(bound * 1e6, 3),
        wrong=wrong,
        calls=len(times),
    )


def predicted(rows: Sequence[Row]) -> list[Row]:
    """Fill in predictions, from one fit per transport and kind of buffer."""
    modelled = defaultdict[tuple[str, bool], list[Row]](list)
    for r in rows:
        if r.modelled:
            modelled[r.transport, r.registered].append(r)
    machines = {kind: fitted(found) for kind, found in modelled.items()}

    def prediction(r: Row) -> float:
        machine = machines[r.transport, r.registered]
        time = seconds(priced(r.collective, r.algorithm, r.ranks), machine, r.bytes)
        return round(time * 1e6, 3)

    return [replace(r, predicted_us=prediction(r)) if r.modelled else r for r in rows]


def fitted(rows: Iterable[Row]) -> Machine:
    """Fit α β γ to the medians of rows that have a price."""
    return fit((priced(r.collective, r.algorithm, r.ranks), r.bytes, r.p50_us / 1e6) for r in rows)


def priced(collective: str, algorithm: str, n: int) -> Price:
    """An algorithm's price. Raises UsageError if there is none, ScheduleError if it is wrong."""
    name, kind = named(algorithm), cast(Collective, collective)
    if (collective, name) in CLOSED:
        return closed(kind, name, n)
    return price(proved(name, kind, n))


def named(algorithm: str) -> str:
    return DEFAULT if algorithm == "auto" else algorithm


@dataclass(frozen=True)
class Report:
    """A file of results."""

    machine: dict[str, str]
    contenders: dict[str, str]  # name -> version and settings
    rows: list[Row]
    # options by name; empty in files that predate this field
    asked: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> Report:
    """Read a file of results. Raises UsageError for any other file."""
    try:
        found = json.loads(path.read_bytes())
        rows = [Row(**r) for r in found.pop("rows")]
        report = Report(**found, rows=rows)
    except OSError as error:
        why = error.strerror
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        why = "it is something else"
    else:
        if isinstance(report.machine, dict) and all(map(_sound, rows)):
            return report
        why = "a row lacks its numbers, or the machine its description"
    raise UsageError(f"{path} holds no results of `ringdp bench --json`: {why}")


def _sound(row: Row) -> bool:
    """Whether every field has its type, and the numbers to be fitted are plausible."""
    kinds = all(_is(getattr(row, f.name), str(f.type)) for f in fields(Row))
    return kinds and 1 <= row.ranks <= MOST_RANKS and row.p50_us >= LEAST_US


def _is(value: object, kind: str) -> bool:
    if value is None:
        return kind.endswith("None")
    if kind in ("str", "bool"):
        return type(value).__name__ == kind
    of = int if kind == "int" else (int, float)
    return isinstance(value, of) and not isinstance(value, bool) and 0 <= value <= MOST


def best_peer(rows: Iterable[Row], row: Row) -> Row | None:
    """The peer with the least median at the same size."""
    peers = [r for r in rows if not r.ours and r.bytes == row.bytes]
    return min(peers, key=lambda r: r.p50_us, default=None)
