"""`ringdp doctor --pid` and `--job`: shows from outside what the ranks of a running job do.

It finds the shared segments that the job's processes hold open, one per communicator, and prints a
table for each. For communicators without shared memory it asks the ranks through the job's store.
The job itself is not disturbed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ringdp.cli.console import folding, put, say
from ringdp.comm.inspection import inspect_job
from ringdp.comm.store import VARIABLES
from ringdp.comm.table import cells, missing
from ringdp.errors import CommunicationError, UsageError
from ringdp.transport.base import FailureKind
from ringdp.transport.records import Observed
from ringdp.transport.shm.watch import Watched, segments
from ringdp.transport.store.processes import has_ended, stat

RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun's --rdzv-id, in the environment of its ranks
# Environment variables that all ranks of a job share.
JOB = (*VARIABLES[1:], RUN_ID, "TORCHELASTIC_RESTART_COUNT")


def show_process(pid: int, console: Console) -> int:
    """Show the communicators of one rank. Returns the exit code."""
    if pid < 1 or has_ended(pid):
        raise UsageError(f"--pid: there is no process {pid}")
    found = _communicators([pid])
    if not found:
        below = " (it has children: --job shows them too)" * (len(family(pid)) > 1)
        raise UsageError(f"--pid: process {pid} holds no communicator of ringdp open{below}")
    return _show(found, console)


def show_job(job: str, console: Console) -> int:
    """Show the communicators of a process and its descendants, or of a torchrun run id."""
    pids = family(int(job)) if re.fullmatch(r"\d{1,9}", job) else []
    pids = pids or _of_run(job)
    if not pids:
        raise UsageError(
            f"--job: {job!r} is neither a process nor the --rdzv-id of a torchrun that runs here"
        )
    found = _communicators(pids)
    if not found:
        raise UsageError(f"--job: none of {len(pids)} processes of {job} holds a communicator open")
    return _show(found, console)


def family(pid: int) -> list[int]:
    """The process and all of its descendants; empty if there is no such process."""
    parent_of = dict(parents())
    below = [pid] if pid in parent_of else []
    for one in below:
        below += [child for child, parent in parent_of.items() if parent == one]
    return below


def parents() -> Iterator[tuple[int, int]]:
    """All processes, each with its parent."""
    for pid in (int(entry.name) for entry in Path("/proc").glob("[0-9]*")):
        try:
            yield pid, int(stat(pid)[1])
        except OSError:
            continue  # it ended while we looked


def _of_run(run_id: str) -> list[int]:
    found = []
    for pid, _ in parents():
        with suppress(OSError):  # another user's
            if _environ(pid).get(RUN_ID) == run_id:
                found.append(pid)
    return found


def _environ(pid: int) -> dict[str, str]:
    """The process's environment; empty if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return dict(os.fsdecode(line).partition("=")[::2] for line in lines)


class Seen(NamedTuple):
    """A communicator: where it was found, and either what was observed or what went wrong."""

    where: str
    observed: Observed | None
    failed: tuple[FailureKind, int] | None = None
    problem: str = ""


def _communicators(pids: list[int]) -> list[Seen]:
    running = [pid for pid in pids if not has_ended(pid)]  # a zombie's files are root's
    try:
        shared = [_shared(path) for path in segments(running)]
        ranks = [e for e in map(_environ, running) if all(v in e for v in VARIABLES)]
    except PermissionError as error:
        raise UsageError(
            f"{error.filename} may not be looked at: run the doctor as the user whose process it is"
        ) from None
    jobs = {tuple((v, environ[v]) for v in JOB if v in environ) for environ in ranks}
    return shared + [seen for job in sorted(jobs) for seen in _told(dict(job) | {"RANK": "0"})]


def _shared(path: Path) -> Seen:
    try:
        watched = Watched(path)
    except CommunicationError as error:
        return Seen(str(path), None, problem=str(error))
    return Seen(str(path), watched, watched.failure())


def _told(environ: dict[str, str]) -> list[Seen]:
    """The communicators of the job whose ranks meet in this store."""
    where = f"the store at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    try:
        found = inspect_job(environ)
    except CommunicationError as error:
        return [Seen(where, None, problem=str(error))]
    return [
        Seen(f"{where}, as {name}", survey, failed and (failed.kind, failed.rank))
        for name, survey, failed in found
    ]


def _show(found: list[Seen], console: Console) -> int:
    for number, (where, observed, failed, problem) in enumerate(found, 1):
        heading = f"communicator {number} of {len(found)}, at {where}"
        if observed is None:
            say(console, f"{heading}: {problem}")
            continue
        records = [observed.record(rank) for rank in range(observed.ranks)]
        pids = ", ".join(str(r.pid) if r and r.pid > 0 else "unknown" for r in records)
        heading += f": {observed.ranks} ranks, of processes {pids}"
        lines = [heading, *_verdicts(observed, failed)]
        say(console, "\n".join(lines))
        headings, *rows = cells(observed)
        made = folding(*headings)
        for row in rows:
            made.add_row(*row)
        put(console, made)
    return int(any(seen.observed is None for seen in found))


def _verdicts(observed: Observed, failed: tuple[FailureKind, int] | None) -> Iterator[str]:
    """What keeps the communicator waiting, as far as the records tell."""
    if failed:
        kind, rank = failed
        yield f"it has failed: {kind.name.lower()}, rank {rank}"
    records = [record for r in range(observed.ranks) if (record := observed.record(r))]
    under_way = [r.finished for r in records if r.begun > r.finished]
    if under_way:
        first = min(under_way)
        yield f"collective #{first}: {missing(observed, first)}"
