"""The files that commands write: whole, or as they were."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from ringdp.errors import RingdpError


def write(path: Path, text: str) -> None:
    """In one step: who is killed on the way leaves what was there. Raises RingdpError, where
    `check_writable` could still write."""
    file = path.resolve()  # a link stays one
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not (path.is_file() and os.access(file.parent, os.W_OK)):
            path.write_text(text, encoding="utf-8")  # a pipe, say, whose place no file can take
        else:
            aside.write_text(text, encoding="utf-8")
            if path.exists():
                shutil.copymode(file, aside)
            aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RingdpError(f"ringdp: cannot write {path}: {error.strerror}") from None


def write_json(path: Path | None, found: object) -> None:
    """`found`: what JSON has, and dataclasses. None: nothing is written."""
    if path is None:
        return
    text = json.dumps(found, indent=1, ensure_ascii=False, default=asdict)
    write(path, f"{text}\n")
