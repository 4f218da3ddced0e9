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
    """A trace. `parts` holds what each rank reported about itself, in rank order."""

    ranks: int
    missing: Mapping[str, str]  # by rank, why its part is missing
    parts: Mapping[int, Mapping[str, Any]]
    events: list[Event]

    def facts(self, kind: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The ranks' reports of one kind, such as "communicators", each with its rank."""
        return ((rank, fact) for rank, part in self.parts.items() for fact in part.get(kind) or ())


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
    try:
        _check_trace(about, document)
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}; {WRITTEN_BY}") from None
    parts = {int(rank): about["parts"][rank] for rank in sorted(about["parts"], key=int)}
    return Run(about["ranks"], about["missing"], parts, document["traceEvents"])


def _check_trace(about: dict[str, Any], document: dict[str, Any]) -> None:
    """Raise ValueError, with what is wrong first. Later checks rely on earlier ones."""
    _check(document, {"traceEvents": [dict]}, "it")
    _check(about, ABOUT, "ringdp")
    ranks, counters = about["ranks"], set()
    for rank, part in about["parts"].items():
        where = f"ringdp.parts.{rank}"
        _check(part, PART, where)
        if not rank.isdecimal() or int(rank) >= ranks:
            raise ValueError(f"{where} is of no rank")
        counters |= {engine["counter"] for engine in part.get("engines") or ()}
    for index, event in enumerate(document["traceEvents"]):
        where, phase = f"traceEvents[{index}]", str(event.get("ph"))
        if phase not in EVENT:
            raise ValueError(f"{where}.ph is {phase!r:.60}; there are {', '.join(EVENT)}")
        _check(event, EVENT[phase], where)
        if event["pid"] >= ranks:
            raise ValueError(f"{where}.pid is {event['pid']}, of no rank")
        kind = event["cat"] if phase == "X" else event["name"]
        of = BYTES if phase == "C" and kind in counters else ARGS.get((phase, kind), dict)
        _check(event["args"], of, f"{where}.args")
    for why in about["missing"].values():
        _check(why, str, "ringdp.missing")


def _parts_beside(path: Path) -> str:
    """Name the parts that ranks have left behind, if rank 0 ended before merging them."""
    found = sorted(map(os.path.basename, glob(f"{escape(str(path))}.*.part")))
    if not found:
        return f"; {WRITTEN_BY}"
    return f": rank 0 ended before it merged {', '.join(found)}; {WRITTEN_BY}"


def _check(value: object, shape: Shape, where: str) -> None:
    """Raise ValueError, with the first place that differs, unless `value` has the shape."""
    if isinstance(shape, Number):
        right, kind = _fits(value, shape), "number of its kind"
    else:
        of = shape if isinstance(shape, type) else type(shape)
        right, kind = isinstance(value, of), KINDS[of]
    if not right:
        raise ValueError(f"{where} is {value!r:.60}, no {kind}")
    if isinstance(shape, list):
        for i, item in enumerate(cast(list[object], value)):
            _check(item, shape[0], f"{where}[{i}]")
    elif isinstance(shape, dict):
        found = cast(dict[str, object], value)
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if key == name and name not in found:
                raise ValueError(f"{where} has no {name}")
            if key == name or found.get(name) is not None:
                _check(found[name], inner, f"{where}.{name}")


def _fits(value: object, number: Number) -> bool:
    kinds = int if number.whole else (int, float)
    return (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and number.least <= value <= number.most
    )
