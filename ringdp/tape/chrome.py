"""Writes spans and counters in Chrome's trace format, which Perfetto opens.

A process stands for a rank; a thread stands for a lane, which is one of the rank's threads or a
communicator. `ts` and `dur` are in µs, and `ts` counts from the begin of the trace.

    ph  X  a span        name cat ts dur pid tid args
        C  a counter     name ts pid args: numbers by category
        M  a name        process_name, thread_name, and their display order

Beside `traceEvents` the file has an object `ringdp` with data for the report; viewers ignore it.
Source: Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ringdp.tape.recorder import Recorder

VERSION = 1
Event = dict[str, Any]


def lines(recorder: Recorder, rank: int, epoch: int, shift: Shift) -> Iterator[str]:
    """Every event of a rank as a line of JSON. `shift` converts its clock to rank 0's."""
    for event in _names(recorder, rank):
        yield _line(event)
    for name, category, lane, begin, end, args in recorder.spans:
        at = _us(shift(begin) - epoch)
        event = {"name": name, "cat": category, "ph": "X", "ts": at, "dur": _us(end - begin)}
        yield _line({**event, "pid": rank, "tid": lane, "args": args or {}})
    for name, moment, values in recorder.counters:
        at = _us(shift(moment) - epoch)
        yield _line({"name": name, "ph": "C", "ts": at, "pid": rank, "args": values})


class Shift:
    """Converts a clock's times in ns to another clock, by linear interpolation.

    The other clock is ahead by `first` at time `at`, and by `then` at time `later`.
    """

    def __init__(self, first: int = 0, at: int = 0, then: int = 0, later: int = 0) -> None:
        self.first, self.at = first, at
        self.rate = (then - first) / (later - at) if later > at else 0.0

    def __call__(self, time: int) -> int:
        return time + self.first + round(self.rate * (time - self.at))


def _names(recorder: Recorder, rank: int) -> Iterator[Event]:
    def named(kind: str, lane: int, **args: object) -> Event:
        return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": args}

    yield named("process_name", 0, name=f"rank {rank}")
    yield named("process_sort_index", 0, sort_index=rank)
    for lane, name in recorder.lanes.items():
        yield named("thread_name", lane, name=name)
        yield named("thread_sort_index", lane, sort_index=lane)


def _us(ns: int) -> float:
    return ns / 1000


_line = json.JSONEncoder(separators=(",", ":")).encode
