"""Writes each rank's part of a trace to a file beside the trace, and merges the parts.

    part   = head, one JSON object | events, one per line
    trace  = {"displayTimeUnit", "ringdp": all heads, "traceEvents": all events}

Both are written under another name and then renamed, so that neither is ever incomplete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ringdp.tape.chrome import VERSION

Head = dict[str, Any]


def part_path(trace: Path, token: str, rank: int) -> Path:
    """The path of a rank's part. `token` distinguishes this run's parts from other runs'."""
    return trace.with_name(f"{trace.name}.{token}.rank{rank}.part")


def check(trace: Path) -> None:
    """Raise OSError if parts cannot be written beside the trace."""
    part = part_path(trace, "-" * 8, 0)
    write_part(part, {}, ())
    part.unlink()


def write_part(path: Path, head: Head, events: Iterable[str]) -> None:
    with replacing(path) as out:
        out.write(f"{json.dumps(head)}\n".encode())
        out.writelines(f"{event}\n".encode() for event in events)


def head(part: Path) -> Head:
    """Read a part's head. Raises OSError if the part is missing, ValueError if it is damaged."""
    with part.open(encoding="utf-8") as lines:
        found: Head = json.loads(lines.readline())
        return found


def merge(trace: Path, parts: Mapping[int, Path], facts: Head) -> None:
    """Write the trace and, even if that fails, remove the parts.

    `facts` holds what all ranks have in common.
    """
    try:
        heads = {str(rank): head(part) for rank, part in parts.items()}
        about = {"version": VERSION, **facts, "parts": heads}
        with replacing(trace) as out:
            start = '{"displayTimeUnit":"ms","ringdp":' + json.dumps(about) + ',"traceEvents":['
            out.write(start.encode())
            between = b"\n"
            for part in parts.values():
                with part.open("rb") as lines:
                    lines.readline()
                    for line in lines:
                        out.write(between + line.rstrip(b"\n"))
                        between = b",\n"
            out.write(b"\n]}\n")
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path`, or the file that it links to, once the block is left.

    If the block raises, or the process is killed, `path` stays as it was.
    """
    file = path.resolve()
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as out:
            yield out
        if file.exists():
            shutil.copymode(file, aside)
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
