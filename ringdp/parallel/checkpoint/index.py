"""What a checkpoint holds, and where: a JSON file, `index.json`, whose replacement is the commit.

    path/index.json              which directory counts, and what is where in it
    path/data-<random>/rank-<r>.safetensors

A tensor's key is `parameter/NAME`, `buffer/NAME`, `optimizer/KEY/NAME` or `extra/N/NAME`. Its
elements, counted in the parameter's own order, lie in parts on the ranks that owned them. `whole`
values of an optimizer (Adam's `step`) lie with the parameter's first element. A save writes a new
directory, then puts a new index in the old one's place by a rename; the directories that no index
names go after that.

Why torch's distributed checkpoint does not do it all: its index, `.metadata`, and what its ranks
tell each other are pickles, which may run anything when they are loaded. Of this index whatever is
read is checked, and it leads to no other directory. The files are its own: any program can load the
directory by its HuggingFaceStorageReader, each tensor flat, under its key.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ringdp.errors import CheckpointError

FORMAT = "ringdp.checkpoint.3"
READS = (FORMAT, "ringdp.checkpoint.2")  # which has no modules


class Part(NamedTuple):
    """Elements begin..end are in the file of `rank`."""

    rank: int
    begin: int
    end: int


@dataclass
class Entry:
    """One tensor. `shape` is that of the parameter, or [] for a whole value."""

    dtype: str
    shape: list[int]
    parts: list[Part] = field(default_factory=list)


@dataclass
class Index:
    directory: str
    ranks: int
    stage: int
    tensors: dict[str, Entry]
    scalars: dict[str, Any]  # what an optimizer's state has beside tensors
    groups: list[dict[str, Any]] | None  # an optimizer's: {"names": [...], "options": {...}}
    extra: dict[str, Any]
    modules: dict[str, Any] = field(default_factory=dict)  # their extra state, see `extra`
    format: str = FORMAT


def file_of(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05}.safetensors"


def new_directory() -> str:
    return f"data-{secrets.token_hex(8)}"


def _is_ours(name: str) -> bool:
    return re.fullmatch("data-[0-9a-f]{16}", name) is not None


def commit(path: Path, index: Index) -> None:
    """Make `index` what `path` holds, in one step."""
    aside = path / "index.json.new"
    with aside.open("w") as file:
        json.dump(asdict(index), file)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path / index.directory)
    os.replace(aside, path / "index.json")
    sync_directory(path)


def clean(path: Path, index: Index) -> None:
    """Remove what saves before `index` have left. Other files of the user's stay."""
    for old in path.glob("data-*"):
        if _is_ours(old.name) and old.name != index.directory:
            shutil.rmtree(old)


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_index(path: Path) -> Index:
    """Raises CheckpointError if `path` holds no checkpoint, or one whose index is not sound."""
    try:
        values = json.loads((path / "index.json").read_text())
        if not isinstance(values, dict):
            raise ValueError("index.json holds no JSON object")
        if values.get("format") not in READS:
            raise CheckpointError(f"{path} is of format {values.get('format')!r}, not {FORMAT!r}")
        values["tensors"] = {
            key: Entry(e["dtype"], e["shape"], [Part(*p) for p in e["parts"]])
            for key, e in values["tensors"].items()
        }
        index = Index(**values)
        _check(index)
        return index
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{path} holds no checkpoint that can be read: {e}") from e


def _check(index: Index) -> None:
    """Raises ValueError, or TypeError, unless every element has its one place."""
    if not _is_ours(index.directory):
        raise ValueError(f"directory {index.directory!r} is not data- and 16 hexadecimal digits")
    for key, entry in index.tensors.items():
        at, elements = 0, math.prod(entry.shape)
        for rank, begin, end in sorted(entry.parts, key=lambda part: part[1:]):
            if not (rank in range(index.ranks) and begin == at <= end):
                raise ValueError(f"{key}: part {begin}..{end} of rank {rank} does not fit")
            at = end
        if at != elements:
            raise ValueError(f"{key} has {elements} elements, and parts for {at}")
    for group in index.groups or []:
        if "params" in group["options"] or not all(isinstance(n, str) for n in group["names"]):
            raise ValueError("a group's names are not strings, or its options have params")
    for name in ("scalars", "extra", "modules"):
        if not isinstance(getattr(index, name), dict):
            raise ValueError(f"{name} is no JSON object")
