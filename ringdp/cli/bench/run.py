"""Measures collectives: rounds of all contenders in turn, and rows of their times.

For each size, every contender has one warm-up round, then `rounds` rounds in turn with the others.
The order rotates, so that a slow phase of the machine hits all of them. The time of a call is the
slowest rank's. A round has as many calls as fit ROUND_SECONDS. The probes of the bound are
contenders too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from ringdp.cli import gpus
from ringdp.cli.bench.bound import LEAST, Speeds, bound
from ringdp.cli.bench.cases import CASES, PROBES, Task, elements
from ringdp.cli.bench.contenders import Round
from ringdp.cli.bench.groups import Group, groups, probe_ranks
from ringdp.cli.bench.machine import describe, load
from ringdp.cli.bench.options import Options, has_own
from ringdp.cli.bench.rows import LIBRARYS, Report, Row, measured, predicted
from ringdp.cli.files import keep_json

ROUND_SECONDS = 0.03  # of timed calls
FEWEST, MOST = 3, 50  # calls in a round
PAGE = 4096


class Entry(NamedTuple):
    """Something to measure: a group of processes, and the task that it runs."""

    group: str
    task: Task


class Step(NamedTuple):
    """Progress: what is being measured."""

    done: float  # share, from 0 to 1
    size: int  # bytes
    entry: str


@dataclass
class Samples:
    """The measurements of one entry at one size."""

    calls: int = FEWEST
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0


def measure(options: Options, on_step: Callable[[Step], None]) -> Report:
    """Measure all sizes. The file is written after every size.

    Raises RankError if a contender fails.
    """
    cores = sorted(os.sched_getaffinity(0))
    machine = describe(len(cores))
    names = [*options.transports, *options.peers, "probe"]
    largest = -(-max(options.sizes[-1], LEAST) // PAGE) * PAGE
    rows: list[Row] = []
    asked = asdict(options) | {"min": options.least, "max": options.most, "json": None}
    with groups(names, options.ranks, cores, largest, pin=options.pin) as started:
        contenders = {name: started[name].version for name in names[:-1]}
        for place, size in enumerate(options.sizes):
            count = elements(CASES[options.collective], options.dtype, size, options.ranks)
            entries = _entries(options, count, max(size, LEAST))
            samples = {entry: Samples() for entry in entries}
            for done, entry in _interleave(started, samples, options.rounds):
                on_step(Step((place + done) / len(options.sizes), size, entry.task.label))
            rows += _rows(options.ranks, len(cores), samples)
            machine["load after"] = load()
            report = Report(machine, contenders, predicted(rows), asked)
            keep_json(options.json, report)
    return report


def _entries(options: Options, count: int, probed: int) -> list[Entry]:
    def entry(group: str, algorithm: str, registered: bool) -> Entry:
        asked = options.collective, algorithm, registered, options.dtype, options.op
        return Entry(group, Task(*asked, count))

    return [
        *(
            entry(transport, algorithm, registered)
            for transport in options.transports
            for registered in options.memories
            for algorithm in options.algorithms
            if algorithm != LIBRARYS or has_own(transport)
        ),
        *(entry(peer, peer, False) for peer in options.peers),
        *(Entry("probe", Task(p, p, False, "float32", "sum", probed // 4)) for p in PROBES),
    ]


def _interleave(
    started: dict[str, Group], samples: dict[Entry, Samples], rounds: int
) -> Iterator[tuple[float, Entry]]:
    """Run all rounds. Before each, yield the share that is done, and the entry that comes next."""
    entries, done = list(samples), 0
    for number in range(rounds + 1):
        turn = number % len(entries)
        for entry in entries[turn:] + entries[:turn]:
            yield done / len(entries) / (rounds + 1), entry
            done += 1
            found = samples[entry]
            ranks = started[entry.group].run(Round(entry.task, number, found.calls))
            slowest = [
                max(times) / 1e9 for times in zip(*(r.nanoseconds for r in ranks), strict=True)
            ]
            found.wrong += sum(r.wrong for r in ranks)
            if number:
                found.seconds += slowest
            else:  # the warm-up
                found.calls = min(MOST, max(FEWEST, int(ROUND_SECONDS / min(slowest))))


def _rows(ranks: int, cores: int, samples: dict[Entry, Samples]) -> Iterable[Row]:
    speeds = _speeds(probe_ranks(ranks, cores), samples)
    for (group, task), found in samples.items():
        if group == "probe":
            continue
        case = CASES[task.collective]
        moves = case.moves(ranks, task.registered)
        least = bound(moves, ranks, cores, task.size, speeds, lap=case.lap)
        on_gpu = group in gpus.CONTENDERS
        yield measured(task, group, ranks, found.seconds, None if on_gpu else least, found.wrong)


def _speeds(ranks: int, samples: dict[Entry, Samples]) -> Speeds:
    """The fastest passes of the probes, which have `ranks` ranks."""
    return Speeds(
        **{
            task.collective: min(found.seconds) / (task.size * PROBES[task.collective].bus(ranks))
            for (group, task), found in samples.items()
            if group == "probe"
        }
    )
