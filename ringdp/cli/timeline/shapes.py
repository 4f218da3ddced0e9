"""What a trace must hold for the report to read it: shapes of JSON, and where a value is another.

A shape is a type, a Number with its bounds, [shape] for a list of any length, {key: shape} for an
object that has at least these keys; a key that ends in "?" may be missing, and its value null.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MOST = 1e15  # µs, bytes, numbers: 30 years


class Number(NamedTuple):
    least: float = -MOST
    most: float = MOST
    whole: bool = True


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
EVENT: dict[str, Shape] = {
    "X": {"cat": str, "ts": Number(whole=False), "dur": TIME, "pid": COUNT, "tid": COUNT},
    "C": {"ts": Number(whole=False), "pid": COUNT},
    "M": {"pid": COUNT, "tid?": COUNT},
}
HELD = ("parameters", "gathered", "gradients", "buckets", "optimizer")
FORMULA = {"gathered": "gathered_peak"}  # where the formula's name is another
BYTES: Shape = dict.fromkeys(HELD, COUNT)  # of an engine's counter
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


def misfit(value: object, shape: Shape, where: str) -> str | None:
    """Where and how `value` is not of that shape, in a line; None where it is."""
    if isinstance(shape, Number):
        return None if _fits(value, shape) else f"{where} is {value!r:.60}, no number of its kind"
    if isinstance(shape, type):
        name = "text" if shape is str else "object"
        return None if isinstance(value, shape) else f"{where} is {value!r:.60}, no {name}"
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is {value!r:.60}, no list"
        found = (misfit(v, shape[0], f"{where}[{i}]") for i, v in enumerate(value))
        return next(filter(None, found), None)
    if not isinstance(value, dict):
        return f"{where} is {value!r:.60}, no object"
    return next(filter(None, (_of_key(value, key, of, where) for key, of in shape.items())), None)


def _of_key(value: dict[str, Any], key: str, shape: Shape, where: str) -> str | None:
    name = key.removesuffix("?")
    if key != name and value.get(name) is None:
        return None
    if name not in value:
        return f"{where} has no {name}"
    return misfit(value[name], shape, f"{where}.{name}")


def _fits(value: object, number: Number) -> bool:
    kinds = int if number.whole else (int, float)
    return (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and number.least <= value <= number.most
    )
