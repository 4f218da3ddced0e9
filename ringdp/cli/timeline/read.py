"""Reads a trace, and checks that it has the structure that the report needs.

A shape is a type, a Number with bounds, [shape] for a list of any length, or {key: shape} for an
object with at least these keys. A key that ends in "?" may be missing, or its value null. Anything
else is refused in one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from glob import escape, glob
from pathlib import Path
from typing import Any, NamedTuple, cast

from ringdp.errors import UsageError
from ringdp.tape.chrome import VERSION, Event

WRITTEN_BY = "allowed: a file of ringdp.trace or of `ringdp train --trace`"


MOST = 1e15  # µs, bytes, numbers: 30 years


class Number(NamedTuple):
    least: float = -MOST
    most: float = MOST
    whole: bool = True


KINDS: dict[type, str] = {str: "text", dict: "object", list: "list"}  # in words
Shape = type | Number | list[Any] | dict[str, Any]

COUNT, TIME, RANKS = Number(0), Number(0, whole=False), Number(1, 4096)
COLLECTIVE: Shape = {
    **dict.fromkeys(("comm", "collective", "algorithm", "at"), str),
    **dict.fromkeys(("number", "bytes"), COUNT),
}
CHUNK: Shape = {
    **dict.fromkeys(("number", "bytes", "piece"), COUNT),
    "round": Number(-1),
    "waited_us?": TIME,
}
NAMED: dict[str, Shape] = {"name": str, "args": dict, "pid": COUNT}
EVENT: dict[str, Shape] = {  # by phase
    "X": {**NAMED, "cat": str, "ts": Number(whole=False), "dur": TIME, "tid": COUNT},
    "C": {**NAMED, "ts": Number(whole=False)},
    "M": {**NAMED, "tid?": COUNT},
}
HELD = ("parameters", "gathered", "gradients", "buckets", "optimizer")
FORMULA = {"gathered": "gathered_peak"}  # where the formula has another name
BYTES: Shape = dict.fromkeys(HELD, COUNT)  # values of an engine's counter
ARGS: dict[tuple[str, str], Shape] = {
    ("X", "collective"): COLLECTIVE,
    ("X", "chunk"): CHUNK,
    ("M", "thread_name"): {"name": str},
}
PART: Shape = {
    "host": str,
    "lost": COUNT,
    "clock_error_us": TIME,
    "communicators?": [
        {
            "name": str,
            "lane": COUNT,
            "ranks": [COUNT],
            "link?": {"latency": TIME, "bandwidth": Number(1, whole=False)},
        }
    ],
    "engines?": [
        {
            "counter": str,
            "stage": COUNT,
            "formula": {FORMULA.get(key, key): COUNT for key in HELD},
            "optimizers?": [str],
        }
    ],
    "schedules?": [
        {
            **dict.fromkeys(("collective", "algorithm"), str),
            "ranks": RANKS,
            "chunks": Number(1, 1 << 16),
            "root": COUNT,
            "rounds": [[[COUNT]]],
        }
    ],
}
ABOUT: Shape = {"ranks": RANKS, "missing": dict, "parts": dict}


class Run(NamedTuple):
    """A trace. `parts` holds what each rank reported about itself, by rank."""

    ranks: int
    missing: Mapping[str, str]  # by rank, why its part is missing
    parts: Mapping[int, Mapping[str, Any]]
    events: list[Event]


def read(path: Path) -> Run:
    """Read a trace. Raises UsageError for any other or damaged file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}{_parts_beside(path)}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text; {WRITTEN_BY}") from None
    try:
        document = json.loads(text)
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply; {WRITTEN_BY}") from None
    except ValueError as error:
        cut = text[:1] == "{" and not text.rstrip().endswith("}")
        why = "is cut off" if cut else "is not JSON"
        raise UsageError(f"{path} {why} ({error}); {WRITTEN_BY}") from None
    about = document.get("ringdp") if isinstance(document, dict) else None
    if not isinstance(about, dict) or about.get("version") != VERSION:
        raise UsageError(f"{path} is no trace of this version of ringdp; {WRITTEN_BY}")
    if found := next(_misfits(about, document), None):
        raise UsageError(f"{path} is damaged: {found}; {WRITTEN_BY}")
    parts = {int(rank): part for rank, part in about["parts"].items()}
    return Run(about["ranks"], about["missing"], parts, document["traceEvents"])


def _misfits(about: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong. Later checks rely on earlier ones: only the first finding is valid."""
    yield from misfits(document, {"traceEvents": [dict]}, "it")
    yield from misfits(about, ABOUT, "ringdp")
    for rank, part in about["parts"].items():
        where = f"ringdp.parts.{rank}"
        yield from misfits(part, PART, where)
        if not rank.isdecimal() or int(rank) >= about["ranks"]:
            yield f"{where} is of no rank"
    engines = [e for part in about["parts"].values() for e in part.get("engines") or ()]
    counters = {engine.get("counter") for engine in engines if isinstance(engine, dict)}
    for index, event in enumerate(document["traceEvents"]):
        where, phase = f"traceEvents[{index}]", str(event.get("ph"))
        if phase not in EVENT:
            yield f"{where}.ph is {phase!r:.60}; there are {', '.join(EVENT)}"
        yield from misfits(event, EVENT[phase], where)
        kind = event["cat"] if phase == "X" else event["name"]
        of = ARGS.get((phase, kind))
        if phase == "C" and kind in counters:
            of = BYTES
        if event["pid"] >= about["ranks"]:
            yield f"{where}.pid is {event['pid']}, of no rank"
        if of is not None:
            yield from misfits(event["args"], of, f"{where}.args")
    for why in about["missing"].values():
        yield from misfits(why, str, "ringdp.missing")


def _parts_beside(path: Path) -> str:
    """Name the parts that ranks have left behind, if rank 0 ended before merging them."""
    found = sorted(map(os.path.basename, glob(f"{escape(str(path))}.*.part")))
    if not found:
        return f"; {WRITTEN_BY}"
    return f": rank 0 ended before it merged {', '.join(found)}; {WRITTEN_BY}"


def misfits(value: object, shape: Shape, where: str) -> Iterator[str]:
    """Yield a line for each place where `value` does not have the shape."""
    if isinstance(shape, Number):
        right, kind = _fits(value, shape), "number of its kind"
    else:
        of = shape if isinstance(shape, type) else type(shape)
        right, kind = isinstance(value, of), KINDS[of]
    if not right:
        yield f"{where} is {value!r:.60}, no {kind}"
    elif isinstance(shape, list):
        for i, item in enumerate(cast(list[object], value)):
            yield from misfits(item, shape[0], f"{where}[{i}]")
    elif isinstance(shape, dict):
        for key, inner in shape.items():
            yield from _of_key(cast(dict[str, object], value), key, inner, where)


def _of_key(value: dict[str, object], key: str, shape: Shape, where: str) -> Iterator[str]:
    name = key.removesuffix("?")
    if key == name or value.get(name) is not None:
        if name in value:
            yield from misfits(value[name], shape, f"{where}.{name}")
        else:
            yield f"{where} has no {name}"


def _fits(value: object, number: Number) -> bool:
    kinds = int if number.whole else (int, float)
    return (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and number.least <= value <= number.most
    )
