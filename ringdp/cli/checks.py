"""What all commands read and check of what they are asked. Every refusal is a UsageError of one
line: the option, what was given, what is allowed."""

import os
import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from ringdp.errors import UsageError


def given(options: Any) -> list[str]:
    """The names of the options that are not at their defaults."""
    return [f.name for f in fields(options) if getattr(options, f.name) != f.default]


def between(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(f"{name} is {value}; allowed: a whole number from {least} to {most}")


def one_of(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


def parse_bytes(option: str, given: str, *, kilo: int = 1024) -> int:
    """`1K`, `64M`, `4096`: powers of `kilo`; `64MiB` of 1024."""
    match = re.fullmatch(r"(\d{1,18})\s*([KMG]?)(i(?=B))?B?", given.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{option} is {given!r}; allowed: bytes, as in 4096, 1K, 64M or 1G")
    unit: int = (1024 if match[3] else kilo) ** " KMG".index(match[2].upper() or " ")
    return int(match[1]) * unit


def names(given: str) -> tuple[str, ...]:
    """What stands between commas, each once and in the order given."""
    return tuple(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Open it as the end of the run will, and leave nothing behind that was not there. None: no
    file is asked for."""
    if path is None:
        return
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UsageError(
            f"{option}: cannot write {path}: {os.strerror(error.errno or 0)}; "
            "allowed: a file in a directory that exists and is writable"
        ) from None
    if not existed:
        path.resolve().unlink()  # a link that led to no file stays, and leads to none
