"""One process's spans and counters while a trace runs, and the sources that report them.

Times are ns of CLOCK_MONOTONIC, which all processes of a host share, and which csrc uses too.
"""

from __future__ import annotations

import os
import threading
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

DRAIN_EVERY = 0.05  # s: tapes have a fixed size and must not overflow
Args = dict[str, Any]


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


class Source(Protocol):
    """An object that reports what it does. It records between `tape_on` and `tape_off`."""

    def tape_on(self, recorder: Recorder) -> None: ...

    def tape_drain(self) -> None:
        """Hand over what there is. Called periodically by a thread; must be quick."""
        ...

    def tape_off(self) -> None:
        """Hand over the rest. Called once for every `tape_on`."""
        ...


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


_sources: WeakSet[Source] = WeakSet()
_asked = set[Source]()  # that record; kept alive until they have handed over everything
_recording: Recorder | None = None
_drains: threading.Thread | None = None
_over = threading.Event()  # tells the draining thread to end
_changing = threading.RLock()


def join(source: Source) -> None:
    """Let this source take part in traces: in one that is running, and in later ones."""
    with _changing:
        _sources.add(source)
        if _recording is not None:
            _ask(source, _recording)


def leave(source: Source) -> None:
    """Remove a source, which first hands over what it has."""
    with _changing:
        _sources.discard(source)
        if source in _asked:
            _asked.remove(source)
            source.tape_off()


def _ask(source: Source, recorder: Recorder) -> None:
    _asked.add(source)
    source.tape_on(recorder)


def recording() -> bool:
    """Whether a trace runs in this process."""
    return _recording is not None


def start() -> Recorder:
    """Let every source record. There can be only one trace at a time: see `recording`."""
    global _recording, _drains
    with _changing:
        assert _recording is None
        _recording = Recorder()
        _recording.thread()  # the first lane
        for source in list(_sources):
            _ask(source, _recording)
        _over.clear()
        _drains = threading.Thread(target=_drain, name="ringdp-tape", daemon=True)
        _drains.start()
        return _recording


def stop() -> None:
    """End the trace; afterwards the recorder has everything."""
    global _recording, _drains
    assert _drains is not None
    _over.set()
    _drains.join()
    with _changing:
        while _asked:
            _asked.pop().tape_off()
        _recording = _drains = None


def _drain() -> None:
    while not _over.wait(DRAIN_EVERY):
        with _changing:
            for source in list(_asked):
                source.tape_drain()
