"""Writes files atomically: a file is either complete, or as it was before."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from ringdp.errors import RingdpError


def write(path: Path, text: str) -> None:
    """Replace the file in one step, so that a kill half-way leaves the old one.

    Raises RingdpError where the file can no longer be written.
    """
    file = path.resolve()  # a link stays one
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not (path.is_file() and os.access(file.parent, os.W_OK)):
            path.write_text(text, encoding="utf-8")  # a pipe, say, which cannot be replaced
        else:
            aside.write_text(text, encoding="utf-8")
            if path.exists():
                shutil.copymode(file, aside)
            aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RingdpError(f"ringdp: cannot write {path}: {error.strerror}") from None


def write_json(path: Path | None, found: object) -> None:
    """Write `found`, which may contain dataclasses, as JSON. A path of None writes nothing."""
    if path is None:
        return
    text = json.dumps(found, indent=1, ensure_ascii=False, default=asdict)
    write(path, f"{text}\n")
