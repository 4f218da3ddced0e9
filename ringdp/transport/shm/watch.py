"""A running job's segments, found and read from outside it, for `ringdp doctor`.

A rank keeps its segment's descriptor open while its communicator lives, and the kernel lets the
same user open it through /proc. The view is read-only, so it cannot disturb the job, and it trusts
nothing that the job wrote.
"""

from __future__ import annotations

import os
from pathlib import Path

from ringdp._core import Watch
from ringdp.errors import CommunicationError
from ringdp.transport.base import FailureKind
from ringdp.transport.records import Call, RankRecord, read_record

NAME = "ringdp"  # of a segment's memfd, as /proc/PID/fd shows it


class Watched:
    """The ranks' records in one segment. See `Observed`."""

    def __init__(self, path: Path) -> None:
        """Raises CommunicationError if `path` cannot be opened, or is not an intact segment."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise CommunicationError(f"{path}: {e.strerror}") from e
        try:
            self._watch = Watch(fd)
        except RuntimeError as e:
            raise CommunicationError(f"{path}: {e}") from e
        finally:
            os.close(fd)
        self.ranks = self._watch.ranks

    def record(self, rank: int) -> RankRecord:
        return read_record(self._watch, rank)

    def call(self, rank: int, number: int) -> Call | None:
        return self._watch.call(rank, number) if number >= 0 else None

    def message(self, rank: int) -> Call | None:
        return self._watch.message(rank)

    def failure(self) -> tuple[FailureKind, int] | None:
        """Return the communicator's failure and the rank at fault or that gave up, if any."""
        kind, rank = self._watch.failed
        known = kind in [k.value for k in FailureKind] and 0 <= rank < self.ranks
        return (FailureKind(kind), rank) if known else None


def segments(pids: list[int]) -> list[Path]:
    """Return a /proc path for each segment that those processes hold open, the oldest first.

    Raises PermissionError for a process of another user.
    """
    found: dict[tuple[int, int], Path] = {}
    for path in (path for pid in pids for path in _descriptors(pid)):
        try:
            if os.readlink(path) == f"/memfd:{NAME} (deleted)":
                file = path.stat()
                found.setdefault((file.st_ino, file.st_dev), path)
        except FileNotFoundError:
            continue  # it was closed while we looked
    return [found[key] for key in sorted(found)]


def _descriptors(pid: int) -> list[Path]:
    directory = Path(f"/proc/{pid}/fd")
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []  # it ended while we looked
