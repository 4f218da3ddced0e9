"""The checkpoint's index: `index.json` says what it has and where, and replacing it is the commit.

    path/index.json              which directory counts, and what is where in it
    path/data-<random>/rank-<r>.safetensors

A tensor's key is `parameter/NAME`, `buffer/NAME`, `optimizer/KEY/NAME` or `extra/N/NAME`. Its
elements, in the parameter's order, are in parts, one in the file of each rank that owned some. Each
rank writes its own optimizer state: a rank without any has no part, and what goes with all of its
elements (Adam's `step`) is a part. Where whole parameters are stepped, the owner writes the state
of all elements. Lists, tuples and dicts in it are as in `nested`. A save writes a new directory,
replaces the index by a rename, and then removes the directories that it does not name.

torch's distributed checkpoint is not used because its index, `.metadata`, and the messages of its
ranks are pickles, which can run code when loaded. This index is checked when read, and cannot point
outside the checkpoint. The files are in torch's format: HuggingFaceStorageReader loads the
directory, each tensor flat, under its key; of single values it sees one rank's only, as all have
the same offset, and a hole where a rank had nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import secrets
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ringdp.errors import CheckpointError

FORMAT = "ringdp.checkpoint.5"


class Part(NamedTuple):
    """Elements begin..end are in the file of `rank`."""

    rank: int
    begin: int
    end: int


@dataclass
class Entry:
    """One tensor, of the parameter's shape. For state that goes with all of a part `single` is its
    shape, as of Adam's `step`, and each part has it once."""

    dtype: str
    shape: list[int]
    parts: list[Part] = field(default_factory=list)
    single: list[int] | None = None

    def elements(self, begin: int, end: int) -> tuple[int, int]:
        """Which elements of what a file has of a part are those begin..end of the part."""
        return (begin, end) if self.single is None else (0, math.prod(self.single))

    def within(self, begin: int, end: int) -> list[Part]:
        """The parts that have any of these elements, in order; of a tensor without any, the one."""
        parts = [p for p in self.parts if (p.begin < end and begin < p.end) or p.begin == p.end]
        return sorted(parts, key=lambda part: part.begin)


@dataclass
class Index:
    directory: str
    ranks: int
    stage: int
    tensors: dict[str, Entry]
    scalars: dict[str, list[Any]]  # of an optimizer: [begin, end, packed value] of each part
    groups: list[dict[str, Any]] | None  # of all optimizers: {"names": [...], "options": {...}}
    extra: dict[str, Any]
    modules: dict[str, Any]  # their extra state, see `extra`
    optimizer: str | None  # the class, or classes with commas between, if there are some
    format: str = FORMAT


def file_of(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05}.safetensors"


def new_directory() -> str:
    return f"data-{secrets.token_hex(8)}"


def _is_ours(name: str) -> bool:
    return re.fullmatch("data-[0-9a-f]{16}", name) is not None


def as_json(index: Index) -> str:
    return json.dumps(vars(index), default=vars)  # the default: of each Entry


def commit(path: Path, index: Index) -> None:
    """Make `index` that of `path`, atomically; after an error `path` holds what it held."""
    sync_directory(path / index.directory)
    replace(path / "index.json", as_json(index))


def replace(path: Path, text: str) -> None:
    """Write `text` to a file that always has either its old text or the new, also on disk."""
    aside = path.with_name(f"{path.name}.new")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)  # last: an error would remove what an index names
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def clean(path: Path, index: Index) -> None:
    """Remove what earlier saves have left, once `index` is on disk. The user's files stay."""
    sync_directory(path)
    for old in path.glob("data-*"):
        if _is_ours(old.name) and old.name != index.directory:
            shutil.rmtree(old)


def sync_directory(path: Path) -> None:
    """fsync a directory: its names are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_index(path: Path) -> Index:
    """Raises CheckpointError if `path` holds no checkpoint, or the index is malformed."""
    try:
        values = json.loads((path / "index.json").read_bytes())
        if not isinstance(values, dict):
            raise ValueError("index.json holds no JSON object")
        if values.get("format") != FORMAT:
            raise CheckpointError(f"{path} is of format {values.get('format')!r}, not {FORMAT!r}")
        return checked(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{path} holds no checkpoint that can be read: {e}") from e


def checked(values: dict[str, Any]) -> Index:
    """The index from JSON values. Raises ValueError, KeyError, TypeError or AttributeError unless
    the types are right and every element is in exactly one part."""
    values["tensors"] = {
        key: Entry(e["dtype"], e["shape"], [Part(*p) for p in e["parts"]], e["single"])
        for key, e in values["tensors"].items()
    }
    index = Index(**values)
    if not _is_ours(index.directory):
        raise ValueError(f"directory {index.directory!r} is not data- and 16 hexadecimal digits")
    _check_ints("ranks and stage", index.ranks, index.stage)
    for key, entry in index.tensors.items():
        _check_entry(index, key, entry)
    for key, parts in index.scalars.items():
        for begin, end, _ in parts:
            _check_ints(key, begin, end)
        _check_parameter(index, key)
        if key in index.tensors:
            raise ValueError(f"{key} is a tensor on some ranks, and none on others")
    for group in index.groups or []:
        _check("a group's options", dict, group["options"])
        _check("a group's names", list, group["names"])
        _check("a group's names", str, *group["names"])
        if "params" in group["options"]:
            raise ValueError("a group's options have params")
    _check_steps(index)
    _check("optimizer", str | None, index.optimizer)
    _check("extra and modules", dict, index.extra, index.modules)
    return index


def _check_entry(index: Index, key: str, entry: Entry) -> None:
    kept = key.startswith("optimizer/")  # then a rank may have no part
    _check(f"the dtype of {key}", str, entry.dtype)
    _check(f"the shape of {key}", list, entry.shape)
    _check(f"the shape of single values of {key}", list | None, entry.single)
    _check_ints(key, *entry.shape, *itertools.chain(*entry.parts), *(entry.single or []))
    if kept:
        _check_parameter(index, key, entry.shape)
    if entry.single is not None and not kept:
        raise ValueError(f"{key} has single values of shape {entry.single}")
    at, elements = 0, math.prod(entry.shape)
    for rank, begin, end in sorted(entry.parts, key=lambda part: part[1:]):
        if not (rank < index.ranks and (begin >= at if kept else begin == at) and begin <= end):
            raise ValueError(f"{key}: part {begin}..{end} of rank {rank} does not fit")
        at = end
    if at > elements or (at < elements and not kept):
        raise ValueError(f"{key} has {elements} elements, and parts for {at}")


def _check(what: str, kind: Any, *values: object) -> None:
    if not all(isinstance(v, kind) for v in values):
        raise ValueError(f"{what}: {values} should be of type {kind}")


def _check_ints(key: str, *values: Any) -> None:
    if not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"{key}: {values} should be integers from 0 up")


def _check_parameter(index: Index, key: str, shape: list[int] | None = None) -> None:
    """Check that the parameter of optimizer state exists, and has that shape."""
    _, _, name = parts_of(key)
    parameter = index.tensors[f"parameter/{name}"].shape
    if shape not in (None, parameter):
        raise ValueError(f"{key} is of shape {shape}, its parameter of {parameter}")


def _check_steps(index: Index) -> None:
    """Check that state has `step` beside it if state of the same names in its group has: what
    counts steps keeps nothing else without it. (timm's Muon keeps two kinds of state.)"""
    groups = {name: n for n, group in enumerate(index.groups or []) for name in group["names"]}
    spans = {key: [part[1:] for part in entry.parts] for key, entry in index.tensors.items()}
    spans |= {key: [(begin, end) for begin, end, _ in of] for key, of in index.scalars.items()}
    steps, others = dict[str, list[tuple[int, int]]](), list[tuple[str, int]]()
    names = defaultdict[str, set[str]](set)
    for key, found in spans.items():
        kind, name, parameter = parts_of(key)
        if kind == "optimizer" and parameter in groups:
            if name == "step":
                steps[parameter] = found
            else:
                others += [(parameter, begin) for begin, _ in found]
                names[parameter].add(name)
    kinds = {parameter: (groups[parameter], frozenset(of)) for parameter, of in names.items()}
    counted = {kinds.get(parameter) for parameter in steps}
    for parameter, at in others:
        if kinds[parameter] in counted and not any(
            begin <= at < end or at == begin for begin, end in steps.get(parameter, ())
        ):
            raise ValueError(
                f"the optimizer's state of {parameter} has no step, that of others has"
            )


def parts_of(key: str) -> tuple[str, str, str]:
    """Splits optimizer/KEY/NAME into the three."""
    kind, _, rest = key.partition("/")
    name, _, parameter = rest.partition("/")
    return kind, name, parameter
