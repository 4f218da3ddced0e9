"""One process's spans and counters while a trace runs, and the tracers that report them.

Times are ns of CLOCK_MONOTONIC, which all processes of a host share, and which csrc uses too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

DRAIN_EVERY = 0.05  # s: tapes have a fixed size and must not overflow
Args = dict[str, Any]
T = TypeVar("T")


class Span(NamedTuple):
    """Something that lasted from `begin` to `end`, in a lane of its rank."""

    name: str
    category: str
    lane: int
    begin: int
    end: int
    args: Args | None = None


class Counter(NamedTuple):
    """Values from `at` on, until the next counter of that name."""

    name: str
    at: int
    values: dict[str, int]


class Tracer:
    """Reports what one object does in one trace. It is made when it is to begin."""

    def drain(self) -> None:
        """Hand over what there is. Called periodically by a thread; must be quick."""

    def end(self) -> None:
        """Hand over the rest, and record no more. Called once."""


class Recorder:
    """`lost` counts the spans for which there was no room."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.counters: list[Counter] = []
        self.lanes: dict[int, str] = {}
        self.facts: dict[str, list[Args]] = {}  # further data for readers, by kind
        self.lost = 0
        self._lane_of: dict[object, int] = {}
        self._lock = threading.Lock()

    def lane(self, key: object, name: str) -> int:
        """The number of the lane for `key`, which is shown as `name`."""
        with self._lock:
            if key not in self._lane_of:
                self._lane_of[key] = len(self._lane_of) + 1
                self.lanes[self._lane_of[key]] = name
            return self._lane_of[key]

    def thread(self, native: int | None = None) -> int:
        """The lane of a thread, by default the current one."""
        native = threading.get_native_id() if native is None else native
        main = native == os.getpid()  # on Linux, also after a fork
        return self.lane(native, "main thread" if main else f"thread {native}")

    def span(self, name: str, category: str, begin: int, **args: Any) -> None:
        """Record a span from `begin` to now, on this thread."""
        lane = self.thread()
        self.spans.append(Span(name, category, lane, begin, monotonic_ns(), args or None))

    def count(self, name: str, values: dict[str, int]) -> None:
        self.counters.append(Counter(name, monotonic_ns(), values))

    def fact(self, kind: str, fact: Args) -> None:
        self.facts.setdefault(kind, []).append(fact)


# What takes part in traces, and what makes its tracer.
_traced: WeakKeyDictionary[Any, Callable[[Any, Recorder], Tracer]] = WeakKeyDictionary()
_tracers = dict[Any, Tracer]()  # of what is traced now, and kept alive until its tracer has ended
_recording: Recorder | None = None
_drains: threading.Thread | None = None
_over = threading.Event()  # tells the draining thread to end
_changing = threading.RLock()


def join(traced: T, tracer: Callable[[T, Recorder], Tracer]) -> None:
    """Trace this object, by `tracer(traced, recorder)`, in a trace that is running, and in later
    ones."""
    with _changing:
        _traced[traced] = tracer
        if _recording is not None:
            _tracers[traced] = tracer(traced, _recording)


def leave(traced: object) -> None:
    """Trace it no more. Its tracer first hands over what it has."""
    with _changing:
        _traced.pop(traced, None)
        if tracer := _tracers.pop(traced, None):
            tracer.end()


def recording() -> bool:
    """Whether a trace runs in this process."""
    return _recording is not None


def start() -> Recorder:
    """Trace everything that has joined. There can be only one trace at a time: see `recording`."""
    global _recording, _drains
    with _changing:
        assert _recording is None
        _recording = Recorder()
        _recording.thread()  # the first lane
        for traced, tracer in list(_traced.items()):
            _tracers[traced] = tracer(traced, _recording)
        _over.clear()
        _drains = threading.Thread(target=_drain, name="ringdp-tape", daemon=True)
        _drains.start()
        return _recording


def stop() -> None:
    """End the trace; afterwards the recorder has everything. Call it again after Ctrl-C."""
    global _recording, _drains
    _over.set()
    if _drains is not None:
        _drains.join()
    with _changing:
        while _tracers:
            _tracers.pop(next(iter(_tracers))).end()
        _recording = _drains = None


def _drain() -> None:
    while not _over.wait(DRAIN_EVERY):
        with _changing:
            for tracer in list(_tracers.values()):
                tracer.drain()
