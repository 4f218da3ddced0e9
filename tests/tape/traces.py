"""Reads trace files for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringdp import Communicator
from ringdp.cli.timeline.read import read

Event = dict[str, Any]


def read_trace(comm: Communicator, path: Path) -> TraceFile:
    """Reads, on all ranks, the file of a trace that has ended; rank 0 writes it."""
    comm.barrier()
    return TraceFile(path)


class TraceFile:
    """A valid trace file."""

    def __init__(self, path: Path) -> None:
        read(path)
        document = json.loads(path.read_bytes())
        self.events: list[Event] = document["traceEvents"]
        self.about: dict[str, Any] = document["ringdp"]

    def spans(self, category: str, rank: int | None = None) -> list[Event]:
        """The spans of a category, in order of their start."""
        found = [
            e
            for e in self.events
            if e.get("cat") == category and (rank is None or e["pid"] == rank)
        ]
        return sorted(found, key=lambda e: e["ts"])

    def names(self, category: str, rank: int) -> list[str]:
        return [e["name"] for e in self.spans(category, rank)]

    def counters(self, rank: int) -> list[Event]:
        return [e for e in self.events if e["ph"] == "C" and e["pid"] == rank]

    def check_nesting(self) -> None:
        """Checks that the spans of a lane are nested or disjoint, as viewers require."""
        lanes: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
        for event in self.events:
            if event["ph"] == "X":
                begin = round(event["ts"] * 1000)  # whole ns, without rounding errors
                span = begin, -begin - round(event["dur"] * 1000), event["name"]
                lanes.setdefault((event["pid"], event["tid"]), []).append(span)
        for spans in lanes.values():
            around: list[int] = []
            for begin, minus_end, name in sorted(spans):
                while around and around[-1] <= begin:
                    around.pop()
                assert not around or -minus_end <= around[-1], name
                around.append(-minus_end)
