"""The format of trace files, how ranks' parts are merged into one, and when objects are traced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringdp.tape import recorder
from ringdp.tape.chrome import Shift, lines
from ringdp.tape.parts import merge, part_path, write_part
from ringdp.tape.recorder import Counter, Recorder, Span, Tracer


def recorded() -> Recorder:
    made = Recorder()
    lane = made.thread()
    made.spans.append(Span("a", "forward", lane, 2_000_500, 2_001_500, {"unit": 1}))
    made.counters.append(Counter("memory", 2_000_000, {"parameters": 8}))
    return made


def test_spans_and_counters_become_chrome_trace_events():
    events = [json.loads(line) for line in lines(recorded(), 3, 1_000_000, Shift(1_000_000))]
    assert events == [
        {"name": "process_name", "ph": "M", "pid": 3, "tid": 0, "args": {"name": "rank 3"}},
        {"name": "process_sort_index", "ph": "M", "pid": 3, "tid": 0, "args": {"sort_index": 3}},
        {"name": "thread_name", "ph": "M", "pid": 3, "tid": 1, "args": {"name": "main thread"}},
        {"name": "thread_sort_index", "ph": "M", "pid": 3, "tid": 1, "args": {"sort_index": 1}},
        {
            "name": "a",
            "cat": "forward",
            "ph": "X",
            "ts": 2000.5,
            "dur": 1.0,
            "pid": 3,
            "tid": 1,
            "args": {"unit": 1},
        },
        {"name": "memory", "ph": "C", "ts": 2000.0, "pid": 3, "args": {"parameters": 8}},
    ]


def test_merged_parts_are_removed(tmp_path: Path):
    trace = tmp_path / "run.json"
    trace.write_text("an older one", encoding="utf-8")
    paths = {rank: part_path(trace, "ab12", rank) for rank in (0, 2)}
    for rank, path in paths.items():
        write_part(path, {"host": "h"}, lines(recorded(), rank, 0, Shift()))
    merge(trace, paths, {"ranks": 3, "missing": {"1": "gone"}})
    read = json.loads(trace.read_bytes())
    assert {e["pid"] for e in read["traceEvents"]} == {0, 2}
    assert read["ringdp"] == {
        "version": 1,
        "ranks": 3,
        "missing": {"1": "gone"},
        "parts": {"0": {"host": "h"}, "2": {"host": "h"}},
    }
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_failed_merge_keeps_only_the_older_trace(tmp_path: Path):
    trace = tmp_path / "run.json"
    trace.write_text("an older one", encoding="utf-8")
    write_part(part := part_path(trace, "ab12", 0), {}, ())
    with pytest.raises(OSError, match="No such file"):
        merge(trace, {0: part, 1: tmp_path / "missing"}, {})
    assert trace.read_text(encoding="utf-8") == "an older one"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_trace_keeps_a_link_and_its_files_permissions(tmp_path: Path):
    target, link = tmp_path / "target.json", tmp_path / "run.json"
    target.touch(mode=0o600)
    link.symlink_to(target.name)
    write_part(part := part_path(link, "ab12", 0), {}, ())
    merge(link, {0: part}, {})
    assert link.is_symlink()
    assert json.loads(target.read_bytes())["traceEvents"] == []
    assert target.stat().st_mode & 0o777 == 0o600


class Source:
    """An object to trace, with what its tracers did."""

    def __init__(self) -> None:
        self.calls: list[str] = []


class SourceTracer(Tracer):
    def __init__(self, source: Source, _: Recorder) -> None:
        self.calls = source.calls
        self.calls.append("on")

    def end(self) -> None:
        self.calls.append("off")


def test_objects_are_traced_only_during_a_trace():
    early, late, leaving = Source(), Source(), Source()
    recorder.join(early, SourceTracer)
    recorder.join(leaving, SourceTracer)
    assert early.calls == []
    recorder.start()
    recorder.join(late, SourceTracer)
    recorder.leave(leaving)
    assert leaving.calls == ["on", "off"]
    recorder.stop()
    assert early.calls == late.calls == ["on", "off"]
    assert leaving.calls == ["on", "off"]
    recorder.leave(early)
    assert early.calls == ["on", "off"]
