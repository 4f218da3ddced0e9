"""`ringdp doctor --pid` and `--job`: what the ranks of a running job do, read from outside it.

It finds the shared segments that the job's processes hold open and prints one table for each, that
is for each communicator. It only reads: a job that hangs goes on hanging.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringdp.comm.table import HEADINGS, missing, process_state, row, table
from ringdp.errors import CommunicationError, UsageError
from ringdp.transport.watch import Watched, segments

RUN_ID = b"TORCHELASTIC_RUN_ID="  # torchrun's --rdzv-id, in the environment of its ranks


def show_process(pid: int, console: Console) -> int:
    """The communicators of one rank. Returns the exit code."""
    if process_state(pid).endswith("has ended"):
        raise UsageError(f"--pid: there is no process {pid}")
    found = _segments([pid])
    if not found:
        below = " (it has children: --job shows them too)" * (len(family(pid)) > 1)
        raise UsageError(f"--pid: process {pid} holds no communicator of ringdp open{below}")
    return _show(found, console)


def show_job(job: str, console: Console) -> int:
    """The communicators of a process and all below it, or of a torchrun run id."""
    pids = family(int(job)) if job.isdigit() else []
    pids = pids or _of_run(job)
    if not pids:
        raise UsageError(
            f"--job: {job} is neither a process nor the --rdzv-id of a torchrun that runs here"
        )
    found = _segments(pids)
    if not found:
        raise UsageError(f"--job: none of {len(pids)} processes of {job} holds a communicator open")
    return _show(found, console)


def family(pid: int) -> list[int]:
    """The process and all that descend from it; none if there is no such process."""
    parents = dict(_parents())
    below = [pid] if pid in parents else []
    for one in below:
        below += [child for child, parent in parents.items() if parent == one]
    return below


def _parents() -> Iterator[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked


def _of_run(run_id: str) -> list[int]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if RUN_ID + os.fsencode(run_id) in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:
            continue  # it ended, or is another user's
    return found


def _segments(pids: list[int]) -> list[Path]:
    try:
        return segments(pids)
    except PermissionError as error:
        raise UsageError(
            f"{error.filename} may not be looked at: run the doctor as the user whose process it is"
        ) from None


def _show(paths: list[Path], console: Console) -> int:
    code = 0
    for number, path in enumerate(paths, 1):
        heading = f"communicator {number} of {len(paths)}, at {path}"
        try:
            watched = Watched(path)
        except CommunicationError as error:
            console.print(f"{heading}: {error}", markup=False, highlight=False, soft_wrap=True)
            code = 1
            continue
        lines = [f"{heading}: {watched.ranks} ranks", *_verdicts(watched)]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        if console.is_terminal:
            console.print(_rich(watched))
        else:
            console.print(table(watched), markup=False, highlight=False, soft_wrap=True)
    return code


def _verdicts(watched: Watched) -> Iterator[str]:
    """Why it does not go on, as far as the records tell."""
    if failure := watched.failure():
        kind, rank = failure
        yield f"it has failed: {kind.name.lower()}, rank {rank}"
    records = [watched.record(r) for r in range(watched.ranks)]
    under_way = [r.finished for r in records if r.begun > r.finished]
    if under_way:
        first = min(under_way)
        yield f"collective #{first}: {missing(watched, first)}"


def _rich(watched: Watched) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for heading in HEADINGS:
        shown.add_column(heading, overflow="fold")
    for rank in range(watched.ranks):
        shown.add_row(*map(Text, row(watched, rank)))  # text, not markup
    return shown
