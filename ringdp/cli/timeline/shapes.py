"""The JSON structure that a trace must have for the report, and a check against it.

A shape is a type, a Number with bounds, [shape] for a list of any length, or {key: shape} for an
object with at least these keys. A key that ends in "?" may be missing, or its value null.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

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
