"""α β γ and device speeds, from files of `ringdp bench` or from vendors' datasheets.

Datasheet figures are peaks. A link's figure is for one direction of one device. γ is the time to
move three bytes of device memory (two read, one written) per byte reduced. A step is priced as if
every message crossed the slowest link: the device's own within a node, `--network` between nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ringdp.cli import gpus
from ringdp.cli.bench.rows import Row, fitted, read
from ringdp.cli.checks import names
from ringdp.errors import UsageError
from ringdp.schedule.cost import Machine


class Device(NamedTuple):
    bf16: float  # flop/s, dense; float16 as fast
    fp32: float
    memory: int  # bytes
    bandwidth: float  # bytes/s, of its memory
    link: float  # bytes/s, to the devices of its node


DEVICES = {
    "a100": Device(312e12, 19.5e12, 80 * 10**9, 2.0e12, 300e9),
    "h100": Device(989e12, 67e12, 80 * 10**9, 3.35e12, 450e9),
    "h200": Device(989e12, 67e12, 141 * 10**9, 4.8e12, 450e9),
}
HOSTS_MEMORY = ("shm", "nccl-host", "peer-host")  # transports through host memory
PER_NODE, BETWEEN_NODES = 8, "400Gb"  # defaults
ASSUMED_ALPHA = 1e-5  # s per message
LEAST_RATE, MOST_RATE = 1e-6, 1e9  # Gb/s or GB/s


class Network(NamedTuple):
    machine: Machine
    source: str
    measured: Sequence[Row] = ()  # those of bench files that were fitted; none: datasheets
    cores: int | None = None  # of the host, if cores move the bytes; None if a device does
    fitted: Mapping[str, Machine] = {}  # by collective, each fitted to its own rows
    yields: bool = False  # in host memory. See Note [gathers yield to reductions]
    bandwidth: float | None = None  # bytes/s of a rank's memory, if it is the host's

    def beside(self, n: int) -> bool:
        """Whether n ranks communicate while they compute, which takes a second core per rank."""
        return self.cores is None or self.cores >= 2 * n

    def of(self, collective: str) -> Machine:
        return self.fitted.get(collective, self.machine)

    def beyond(self, collectives: set[str], n: int, sizes: set[int]) -> list[str]:
        """How a prediction for these goes beyond what was measured, in words."""
        if not self.measured:
            return ["nothing was measured: datasheet bandwidth, and α is assumed"]
        found = []
        if n not in (ranks := {r.ranks for r in self.measured}):
            found.append(f"{n} ranks, measured {', '.join(map(str, sorted(ranks)))}")
        least, most = (of(r.bytes for r in self.measured) for of in (min, max))
        if out := [s for s in sizes if not least <= s <= most]:
            found.append(f"{max(out):,} bytes of buffers, measured {least:,} to {most:,}")
        if more := sorted(collectives - self.fitted.keys()):
            found.append(f"{', '.join(more)}, measured {', '.join(sorted(self.fitted))}")
        if self.yields:
            found.append("the optimizer, at the bytes/s of the largest collective")
        return found


def network(
    given: str | None,
    device: str,
    ranks: int,
    *,
    per_node: int | None = None,
    alpha: float | None = None,
) -> Network:
    """Parse `400Gb` (bits/s), `50GB` (bytes/s), or .json files, which also fix where ranks are.

    Raises UsageError for anything else, and for options that would have no effect.
    """
    if given is not None and given.endswith(".json"):
        for option, value in (("--alpha", alpha), ("--per-node", per_node)):
            if value is not None:
                raise UsageError(
                    f"{option} is {value}; allowed: none with {given}, which says its own"
                )
        return from_files(given)
    has, node = DEVICES[device], PER_NODE if per_node is None else per_node
    alpha, gamma = ASSUMED_ALPHA if alpha is None else alpha, 3 / has.bandwidth
    speed = BETWEEN_NODES if given is None else given.strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(Gb|GB)(?:/s|ps)?", speed)
    if match is None or not LEAST_RATE <= float(match[1]) <= MOST_RATE:
        raise UsageError(
            f"--network is {given!r}; allowed: bits a second as in 400Gb or bytes as in 50GB, a "
            f"number from {LEAST_RATE:g} to {MOST_RATE:g} of either; or with commas .json files of "
            "`ringdp bench --json`"
        )
    if ranks <= node:
        if given is not None:
            raise UsageError(
                f"--network is {given!r}, between nodes; allowed: none with --ranks {ranks}, which "
                f"are on one node of {node} (--per-node)"
            )
        return Network(Machine(alpha, 1 / has.link, gamma), f"{device}'s links within its node")
    if ranks % node:
        raise UsageError(
            f"--ranks is {ranks}; allowed: a multiple of --per-node, which is {node}, or fewer"
        )
    rate = float(match[1]) * 1e9 / (8 if match[2] == "Gb" else 1)
    return Network(
        Machine(alpha, 1 / rate, gamma),
        f"{match[1]}{match[2]}/s a rank, as if all messages crossed nodes",
    )


def from_files(given: str) -> Network:
    """Fit α β γ to the medians of ringdp's built-in algorithms.

    Only the first transport's rows count, and of these only registered buffers if there are any,
    since the engine's buffers are registered. Each collective is fitted to its own rows: in shared
    memory an all_reduce of 4 MiB takes less than the all_gather that its price contains. A fit to
    all rows serves collectives that were not measured.
    """
    files = names(given)
    reports, named = [read(Path(file)) for file in files], ", ".join(files)
    machines = [f"{r.machine.get('cpu')} of {r.machine.get('cores')} cores" for r in reports]
    if len(set(machines)) > 1:
        raise UsageError(
            f"--network: {named} were measured on {', '.join(machines)}; allowed: files of one "
            "machine"
        )
    rows = [row for report in reports for row in report.rows if row.built_in]
    rows = [row for row in rows if row.transport == rows[0].transport]
    rows = [row for row in rows if row.registered] or rows
    if not rows:
        raise UsageError(
            f"--network: {named} holds no row of ringdp's own algorithms; allowed: at least one"
        )
    collectives = dict.fromkeys(r.collective for r in rows)
    transport = rows[0].transport
    cores = str(reports[0].machine.get("cores"))
    yields = transport in HOSTS_MEMORY
    return Network(
        machine=fitted(rows),
        source=f"fitted to {len(rows)} {transport} rows of {named}",
        measured=rows,
        cores=None if transport in gpus.ON_GPU else int(cores) if cores.isdecimal() else 0,
        fitted={c: fitted(r for r in rows if r.collective == c) for c in collectives},
        yields=yields,
        bandwidth=_bandwidth(rows) if yields else None,
    )


def _bandwidth(rows: Sequence[Row]) -> float:
    """bytes/s of the slowest of the largest collectives, if each byte is read and written once."""
    most = max(r.bytes for r in rows)
    return 2 * most / max(r.p50_us / 1e6 for r in rows if r.bytes == most)
