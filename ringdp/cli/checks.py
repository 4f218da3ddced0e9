"""Parsing and checks of options that several commands share.

Every refusal is a UsageError of one line: the option, its value, and what is allowed.
"""

import os
import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from typer import BadParameter, Option

from ringdp.comm.tracing import unwritable
from ringdp.errors import UsageError


def given(options: Any) -> list[str]:
    """The names of the options that are not at their defaults."""
    return [f.name for f in fields(options) if getattr(options, f.name) != f.default]


def between(
    name: str, value: float | None, least: float, most: float, allowed: str | None = None
) -> None:
    """Raise UsageError unless the value lies there, or is None: not given. NaN lies nowhere."""
    if value is not None and not least <= value <= most:
        allowed = allowed or f"a whole number from {least} to {most}"
        raise UsageError(f"{name} is {value}; allowed: {allowed}")


def one_of(name: str, value: str | None, allowed: Collection[str]) -> None:
    if value is not None and value not in allowed:
        raise UsageError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


def parse_bytes(option: str, given: str, *, kilo: int = 1024) -> int:
    """Parse `1K`, `64M` or `4096` with units that are powers of `kilo`; MiB is always 1024²."""
    match = re.fullmatch(r"(\d{1,18})\s*([KMG]?)(i(?=B))?B?", given.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{option} is {given!r}; allowed: bytes, as in 4096, 1K, 64M or 1G")
    unit: int = (1024 if match[3] else kilo) ** " KMG".index(match[2].upper() or " ")
    return int(match[1]) * unit


def names(given: str) -> tuple[str, ...]:
    """Split at commas, dropping repetitions and keeping the order."""
    return tuple(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))


def written(says: str) -> Any:
    """An option that takes a file to write, with its help."""
    return Option(help=says, parser=file_named, metavar="<path>")


def file_named(given: str) -> Path:
    """Refuse what a Path would make another name of: an empty one, as of a shell's variable that is
    not set, would be the current folder, and that of a directory that does not exist a file's."""
    if not given:
        raise BadParameter("a path is empty; allowed: a file in a directory that exists")
    if given.endswith(("/", "/.")) and not os.path.isdir(given):
        raise BadParameter(f"{given} names a directory; allowed: a file in one that exists")
    return Path(given)


def check_writable(path: Path | None, option: str = "--json", *, trace: bool = False) -> None:
    """Raise UsageError unless `path`, or a trace there, can be written; leave no new file behind.

    Nothing is checked for None, which means that no file is asked for.
    """
    if path is not None and (complaint := unwritable(option, path, trace=trace)):
        raise UsageError(complaint)
