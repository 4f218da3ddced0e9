"""Reads and checks a trace; anything else is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringdp.cli.timeline import shapes
from ringdp.cli.timeline.shapes import misfits
from ringdp.errors import UsageError
from ringdp.tape.chrome import VERSION, Event

WRITTEN_BY = "allowed: a file of ringdp.trace or of `ringdp train --trace`"


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
    yield from misfits(about, shapes.ABOUT, "ringdp")
    for rank, part in about["parts"].items():
        where = f"ringdp.parts.{rank}"
        yield from misfits(part, shapes.PART, where)
        if not rank.isdecimal() or int(rank) >= about["ranks"]:
            yield f"{where} is of no rank"
    engines = [e for part in about["parts"].values() for e in part.get("engines") or ()]
    counters = {engine.get("counter") for engine in engines if isinstance(engine, dict)}
    for index, event in enumerate(document["traceEvents"]):
        where, phase = f"traceEvents[{index}]", str(event.get("ph"))
        if phase not in shapes.EVENT:
            yield f"{where}.ph is {phase!r:.60}; there are {', '.join(shapes.EVENT)}"
        yield from misfits(event, shapes.EVENT[phase], where)
        kind = event["cat"] if phase == "X" else event["name"]
        of = shapes.ARGS.get((phase, kind))
        if phase == "C" and kind in counters:
            of = shapes.BYTES
        if event["pid"] >= about["ranks"]:
            yield f"{where}.pid is {event['pid']}, of no rank"
        if of is not None:
            yield from misfits(event["args"], of, f"{where}.args")
    for why in about["missing"].values():
        yield from misfits(why, str, "ringdp.missing")


def _parts_beside(path: Path) -> str:
    """Name the parts that ranks have left behind, if rank 0 ended before merging them."""
    found = sorted(p.name for p in path.parent.glob(f"{path.name}.*.part")) if path.name else []
    if not found:
        return f"; {WRITTEN_BY}"
    return f": rank 0 ended before it merged {', '.join(found)}; {WRITTEN_BY}"
