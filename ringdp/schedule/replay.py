"""Replays a schedule in one self-contained HTML file that steps through the rounds.

The page shows the states that `verify` steps through, and computes none of its own. It is
replay.html with the schedule inserted as JSON. It does not show time: all rounds look equally long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from itertools import pairwise
from pathlib import Path

from ringdp.errors import UsageError
from ringdp.schedule.algorithms import Collective
from ringdp.schedule.contracts import State, Value, contract
from ringdp.schedule.draw import grid
from ringdp.schedule.ir import Schedule
from ringdp.schedule.verify import states

PAGE, HEAD = (Path(__file__).with_name(f"{name}.html") for name in ("replay", "head"))
MOST_SLOTS = 4096  # a ring all-reduce of 64 ranks; browsers still step through it without delay


def html(schedule: Schedule, collective: Collective, *, title: str | None = None) -> str:
    """Return the page. Append `#round=3` to its URL to open it at round 3.

    Raises UsageError if there are more than 4096 slots, and ScheduleError if a transfer breaks a
    rule.
    """
    slots = schedule.chunks + schedule.scratch
    if schedule.ranks * slots > MOST_SLOTS:
        raise UsageError(
            f"a replay shows at most {MOST_SLOTS} slots; {schedule.ranks} ranks of {slots} chunks "
            f"and scratch are {schedule.ranks * slots}: show it for fewer ranks or chunks"
        )
    parts = {
        "title": escape(title or f"{collective} on {schedule.ranks} ranks"),
        "grid": escape(grid(schedule, whole=True)),
        "data": json.dumps(_data(schedule, collective), separators=(",", ":")),
    }
    return filled(PAGE.read_text(encoding="utf-8"), parts)


def filled(page: str, parts: Mapping[str, str]) -> str:
    """Return `page` with {{head}} replaced by head.html, and {{name}} by parts[name]."""
    before, *pieces = page.replace("{{head}}", HEAD.read_text(encoding="utf-8")).split("{{")
    return before + "".join(
        parts[name] + rest for name, _, rest in (p.partition("}}") for p in pieces)
    )


def _data(schedule: Schedule, collective: Collective) -> dict[str, object]:
    """Return the page's data. Slot (rank, chunk) is rank · slots + chunk; a value is an index
    into `values`."""
    slots = schedule.chunks + schedule.scratch
    places: dict[Value, int] = {}

    def held(state: State) -> list[tuple[int, int]]:
        return sorted(
            (rank * slots + chunk, places.setdefault(value, len(places)))
            for (rank, chunk), value in state.items()
        )

    before, after = contract(collective, schedule.ranks, schedule.chunks)
    steps = pairwise(states(schedule, before))
    return {
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "slots": slots,
        "rounds": schedule.rounds,
        "before": held(before),
        "changes": [
            held({slot: value for slot, value in new.items() if old.get(slot) is not value})
            for old, new in steps
        ],
        "after": held(after),
        "values": [sorted(value) for value in places],
    }
