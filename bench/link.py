"""Checks the cost model: times collectives over an emulated link.

    python -m bench.link --json bench/results/link.json

α is the link's latency and β the inverse of its bandwidth; γ is 0, because a host adds faster than
this link moves bytes. A time runs from the last rank's call to the last rank's return, on the clock
that all processes of a host share.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

import ringdp
from bench import jobs
from bench.results import parser, record
from bench.turns import ms, timed
from ringdp.schedule.cost import Machine, closed, seconds

LINK = ringdp.Link(latency=2e-3, bandwidth=1e8)  # s, bytes/s
RANKS = (2, 3, 4, 5, 6, 7, 8)
ALGORITHMS = ("ring", "direct")
SIZES = tuple(1 << k for k in (16, 18, 20, 22, 24))  # bytes
CALLS = 7
LEAST_CALLS, LONG = 3, 0.2  # calls of what takes longer than LONG s


@dataclass(frozen=True)
class LinkRow:
    """Times of an all_reduce in ms."""

    ranks: int
    algorithm: str
    bytes: int
    predicted: float
    min: float
    median: float
    max: float

    @property
    def ratio(self) -> float:
        return self.median / self.predicted


def main() -> dict[str, object]:
    rows = []
    for n in RANKS:
        for row in jobs.run(n, measured):
            rows.append(row)
            print(
                f"{row.ranks} ranks {row.algorithm:<6} {row.bytes:>10,} bytes: predicted "
                f"{row.predicted:8.2f} ms, measured {row.min:8.2f} {row.median:8.2f} "
                f"{row.max:8.2f}, {row.ratio:.3f}",
                flush=True,
            )
    worst = max(rows, key=lambda row: abs(row.ratio - 1))
    print(f"median ratio {statistics.median(r.ratio for r in rows):.3f}, worst {worst.ratio:.3f}")
    return {"link": LINK._asdict(), "rows": rows}


def measured() -> list[LinkRow]:
    clock, comm = ringdp.init(), ringdp.init(link=LINK)
    return [
        one(clock, comm, algorithm, size, predicted(comm.size, algorithm, size))
        for size in SIZES
        for algorithm in ALGORITHMS
    ]


def predicted(n: int, algorithm: str, size: int) -> float:
    machine = Machine(alpha=LINK.latency, beta=1 / LINK.bandwidth, gamma=0)
    return seconds(closed("all_reduce", algorithm, n), machine, size)


def one(
    clock: ringdp.Communicator, comm: ringdp.Communicator, algorithm: str, size: int, says: float
) -> LinkRow:
    buffer = torch.ones(size // 4)
    calls = LEAST_CALLS if says > LONG else CALLS
    times = timed(clock, lambda: comm.all_reduce(buffer, algorithm=algorithm), calls, warmups=1)
    return LinkRow(comm.size, algorithm, size, *ms(says, times))


if __name__ == "__main__":
    record(parser(__doc__), main)
