"""Writes files atomically: a file is either complete, or as it was before."""

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ringdp.errors import RingdpError
from ringdp.tape.parts import replacing


def write(path: Path, text: str) -> int:
    """Replace the file in one step, so that a kill half-way leaves the old one; return its bytes.

    Raises RingdpError where the file can no longer be written.
    """
    data = text.encode(errors="backslashreplace")  # names of files need not be Unicode
    replaceable = path.is_file() and os.access(path.resolve().parent, os.W_OK)
    try:
        if path.exists() and not replaceable:
            path.write_bytes(data)  # a pipe, say
        else:
            with replacing(path) as out:
                out.write(data)
    except OSError as error:
        raise RingdpError(f"ringdp: cannot write {path}: {error.strerror}") from None
    return len(data)


def write_json(path: Path | None, found: object) -> None:
    """Write `found`, which may contain dataclasses, as JSON. A path of None writes nothing."""
    if path is None:
        return
    text = json.dumps(found, indent=1, ensure_ascii=False, default=asdict)
    write(path, f"{text}\n")


def keep_json(path: Path | None, so_far: object) -> None:
    """`write_json` what is not complete yet, but not to a pipe or a device, where it would stay.

    A disk that is full now may have room at the end; if not, the last `write_json` says so.
    """
    if path is not None and (path.is_file() or not path.exists()):
        with suppress(RingdpError):
            write_json(path, so_far)
