"""The text that `ringdp train` learns, and the global batch of each step.

A batch depends only on (seed, step). Every rank draws the whole batch and takes its own rows, so a
single process that takes all rows sees the same batch.
"""

import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ringdp.errors import UsageError

LIMIT = 8 << 20  # bytes: more would only slow the start of every rank


@dataclass(frozen=True)
class Text:
    """Bytes, their source, and the number of files that they come from."""

    source: str
    files: int
    data: bytes

    @contextmanager
    def shared(self) -> Iterator[Path]:
        """Yield a path from which this user's other processes can read `data` meanwhile."""
        with os.fdopen(os.memfd_create("ringdp-text"), "wb") as file:
            file.write(self.data)
            file.flush()
            yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def load(path: Path | None, least: int) -> Text:
    """Read a file, all files below a directory, or (None) the standard library's sources.

    Files are joined in path order and cut at LIMIT bytes. Below a directory, files with a zero byte
    are taken to be binary and skipped. Raises UsageError if a file cannot be read, or if there are
    fewer than `least` bytes.
    """
    allowed = f"allowed: a readable file or directory with at least {least} bytes of text"
    source = "the Python standard library" if path is None else f"{path}"
    try:
        stdlib = Path(sysconfig.get_path("stdlib"))
        files = sorted(stdlib.glob("*.py")) if path is None else _files(path)
        data, used = _join(files, keep_binary=files == [path])
    except OSError as error:
        where = error.filename or path
        raise UsageError(f"--text: cannot read {where}: {error.strerror}; {allowed}") from None
    if len(data) < least:
        raise UsageError(f"--text: {source} holds {len(data)} bytes of text; {allowed}")
    return Text(source, used, data)


def batch(
    text: bytes, seed: int, step: int, rows: int, context: int
) -> npt.NDArray[np.int64]:  # [rows, context + 1]
    """The global batch of a step: `rows` windows at random offsets drawn from (seed, step)."""
    tokens = np.frombuffer(text, dtype=np.uint8)
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - context, size=rows)
    return np.asarray(tokens[starts[:, None] + np.arange(context + 1)], dtype=np.int64)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if path.exists() and not path.is_file():
            raise OSError(0, "it is neither a file nor a directory", str(path))
        return [path]

    def refuse(error: OSError) -> None:
        raise error

    found = [Path(top, name) for top, _, names in os.walk(path, onerror=refuse) for name in names]
    return sorted(file for file in found if file.is_file())


def _join(files: list[Path], *, keep_binary: bool) -> tuple[bytes, int]:
    """The first LIMIT bytes of the files, and how many files they come from."""
    parts: list[bytes] = []
    room = LIMIT
    for file in files:
        with file.open("rb") as stream:
            part = stream.read(room)
        if not part or (b"\0" in part and not keep_binary):
            continue
        parts.append(part)
        room -= len(part)
        if room == 0:
            break
    return b"".join(parts), len(parts)
