"""Writes files atomically: a file is either complete, or as it was before."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from ringdp.errors import RingdpError
from ringdp.tape.parts import replacing


def write(path: Path, text: str) -> None:
    """Replace the file in one step, so that a kill half-way leaves the old one.

    Raises RingdpError where the file can no longer be written.
    """
    replaceable = path.is_file() and os.access(path.resolve().parent, os.W_OK)
    try:
        if path.exists() and not replaceable:
            path.write_text(text, encoding="utf-8")  # a pipe, say
        else:
            with replacing(path) as out:
                out.write(text)
    except OSError as error:
        raise RingdpError(f"ringdp: cannot write {path}: {error.strerror}") from None


def write_json(path: Path | None, found: object) -> None:
    """Write `found`, which may contain dataclasses, as JSON. A path of None writes nothing."""
    if path is None:
        return
    text = json.dumps(found, indent=1, ensure_ascii=False, default=asdict)
    write(path, f"{text}\n")
