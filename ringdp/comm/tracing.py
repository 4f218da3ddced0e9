"""`ringdp.trace`: records what all ranks did and when, in one file.

Every rank records and writes its part next to the file; rank 0 merges the parts. If a rank dies,
rank 0 merges the others' parts and reports which one is missing.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from ringdp.comm.rendezvous import TIMEOUT, last
from ringdp.comm.store import host, job_store, meeting
from ringdp.errors import RingdpError, UsageError
from ringdp.tape import chrome, parts, recorder
from ringdp.tape.meeting import Meeting
from ringdp.transport.store.client import limited
from ringdp.transport.store.handshake import Places
from ringdp.transport.store.processes import has_ended, pid_of

log = logging.getLogger("ringdp")

PATIENCE = 60.0  # s that rank 0 waits for the parts
HASTE = 5.0  # s that it waits after an error
ANSWER = 10.0  # s that ranks of different hosts wait for each other's clocks at the end


def trace(path: str | os.PathLike[str]) -> Trace:
    """Record what all ranks do and when, and write it to `path` for Perfetto and `ringdp report`.

    Use it as `with ringdp.trace("run.json"): ...`, or call its `start` and `stop`. Collective:
    every rank of the job does so at the same place. Only one trace can run at a time.

    A trace has every collective with its chunks (rows of a program, tiles of direct exchanges) and
    the waits for it; gathers, prefetches, frees and reductions of an engine or of DDP; forward and
    backward of units; optimizer steps; and bytes held by category. Rank 0's `path` is used, and the
    file exists once rank 0 leaves the block. Raises UsageError if it cannot be written, and
    CommunicationError if a rank does not arrive.
    """
    return Trace(path)


class Trace:
    """The context manager that `trace` returns."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._given = Path(path), path
        self._recorder: recorder.Recorder | None = None

    def start(self) -> Trace:
        """Start recording. Collective."""
        if recorder.recording():
            raise UsageError("a trace runs in this process already; stop it first")
        store, rank, ranks = job_store(TIMEOUT)
        before = PrefixStore(comm._name, store) if (comm := last()) else store
        places = Places(before, range(ranks))
        there, _ = meeting(PrefixStore("trace", store), rank, ranks, TIMEOUT, "trace", places)
        there, pids = limited(there, TIMEOUT), cache(partial(pid_of, limited(before, TIMEOUT)))
        self._meeting = Meeting(there, rank, ranks, host(), has_ended, pid_of=pids)  # type: ignore[arg-type]  # torch's stubs
        complaint = unwritable("trace", self._given, trace=True) if rank == 0 else None
        own = str(self.path.absolute())
        self._opened = self._meeting.open(complaint, own)
        # Do not write where only the store says: anybody may have written it there.
        self._next_to_file = self._opened.path == own and rank not in self._meeting.away
        self._recorder = recorder.start()
        return self

    def stop(self) -> None:
        """Stop, and write the file. Collective. Raises RingdpError if it cannot be written."""
        self._end(PATIENCE)

    def __enter__(self) -> Trace:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
            return
        try:
            self._end(HASTE)
        except RingdpError as e:  # do not hide the user's exception
            log.warning("%s", e)

    def _end(self, patience: float) -> None:
        recorded = self._recorder
        if recorded is None:
            raise UsageError("this trace does not run; start it first")
        meeting = self._meeting
        if (process := meeting.members[meeting.rank].pid) != os.getpid():
            raise UsageError(
                f"this trace belongs to process {process}; process {os.getpid()}, forked from it, "
                "cannot end it"
            )
        recorder.stop()
        self._recorder = None  # not before: after Ctrl-C `stop` can be called again
        if patience == PATIENCE:
            with suppress(RuntimeError, ValueError):  # then the first estimate is used
                meeting.compare_clocks("last", ANSWER)
        part = self._part(meeting.rank)
        try:
            lines = chrome.lines(recorded, meeting.rank, self._opened.epoch, meeting.shift)
            parts.write_part(part, self._head(recorded), lines)
        except OSError as e:
            with suppress(RuntimeError):
                meeting.excuse(f"it cannot write {part}: {e.strerror}")
            raise _unwritten(self.path, e) from None
        if meeting.rank == 0:
            self._merge(part, monotonic() + patience)
            return
        try:
            meeting.hand_in(part, beside=self._next_to_file)
        except RuntimeError:  # from the store, which rank 0 may have served
            log.warning(
                "rank %d cannot tell rank 0 of its part of the trace, %s", *(meeting.rank, part)
            )

    def _part(self, rank: int) -> Path:
        """Return the path of a rank's part: next to rank 0's file if this rank named the same path
        on the same host, else in the temporary directory."""
        trace = Path(self._opened.path)
        if not self._next_to_file:
            trace = Path(tempfile.gettempdir(), self.path.name)
        return parts.part_path(trace, self._opened.token, rank)

    def _head(self, recorded: recorder.Recorder) -> dict[str, Any]:
        name, guesses = host(), self._meeting.guesses
        return {
            "host": name.split()[0],
            "pid": os.getpid(),
            "clock_error_us": max((g.error for g in guesses), default=0) / 1000,
            "lost": recorded.lost,
            **recorded.facts,
        }

    def _merge(self, own: Path, deadline: float) -> None:
        there, missing = {0: own}, {}
        for rank in range(1, self._meeting.ranks):
            part = self._part(rank)
            try:
                why = self._meeting.collect(rank, part, deadline)
                if why is None:
                    parts.head(part)
            except (RuntimeError, ValueError, OSError) as e:
                why = f"rank {rank}'s part of the trace cannot be had: {e}"
            if why is None:
                there[rank] = part
            else:
                missing[str(rank)] = why
                log.warning("%s: %s", self.path, why)
        try:
            parts.merge(
                Path(self._opened.path), there, {"ranks": self._meeting.ranks, "missing": missing}
            )
        except OSError as e:
            raise _unwritten(self.path, e) from None


def unwritable(asked: str, given: str | os.PathLike[str], *, trace: bool) -> str | None:
    """Return why `given` cannot be written, or None; leave no new file behind.

    `asked` begins the message. A trace replaces the file, and has parts beside it.
    """
    path, given = Path(given), os.fspath(given)
    try:
        if not given:
            raise ValueError("a path is empty")
        if given.endswith(("/", "/.")) and not path.is_dir():
            raise ValueError("it names a directory")  # as a Path it would be that of a file
        if path == Path("-"):
            raise ValueError("it means standard output, not a file")
        existed = path.exists()
        if trace and existed and not (path.is_file() or path.is_dir()):
            raise ValueError("it is a device or a pipe")
        if not path.is_fifo():  # its reader would see its end
            with path.open("ab"):
                pass
            if not existed:
                path.resolve().unlink()  # keeps a dangling link
        if trace:
            parts.check(path)
    except (OSError, ValueError) as e:  # ValueError: also a name with a null byte
        return (
            f"{asked}: cannot write {given}: {getattr(e, 'strerror', e)}; allowed: a file in a "
            "directory that exists and is writable"
        )
    return None


def _unwritten(path: Path, error: OSError) -> RingdpError:
    return RingdpError(f"ringdp: cannot write the trace {path}: {error.strerror}")
