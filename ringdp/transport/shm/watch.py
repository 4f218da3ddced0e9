"""A job's segments seen from outside it: which ones a process holds, and a read-only view of each.

A rank keeps its segment's descriptor open as long as its communicator lives; the kernel lets the
same user open it through /proc. Nothing here can disturb the job, and nothing it wrote is trusted.
"""

from __future__ import annotations

import os
from pathlib import Path

from ringdp._core import Watch
from ringdp.errors import CommunicationError
from ringdp.transport.base import FailureKind
from ringdp.transport.records import Call, RankRecord, read_record

NAME = "ringdp"  # of a segment's file, see /proc/PID/fd


class Watched:
    """One segment: its ranks' records. Raises CommunicationError if it is not one, or damaged."""

    def __init__(self, path: Path) -> None:
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
        """What ended it, and the rank at fault, or that gave up."""
        kind, rank = self._watch.failed
        known = kind in [k.value for k in FailureKind] and 0 <= rank < self.ranks
        return (FailureKind(kind), rank) if known else None


def segments(pids: list[int]) -> list[Path]:
    """Where those processes hold segments open, each segment once, the oldest first.

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
