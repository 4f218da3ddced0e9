"""A made-up trace of 2 ranks with known figures; times in µs."""

from __future__ import annotations

from pathlib import Path

from ringdp.schedule import fuse, project, schedule
from ringdp.tape.chrome import Shift, lines
from ringdp.tape.parts import merge, part_path, write_part
from ringdp.tape.recorder import Counter, Recorder, Span

COMM = {"name": "1.2", "label": "reductions of stage 2", "lane": 2, "ranks": [0, 1]}
LATE = 100  # how much later rank 1 begins its collectives
STEP = 2000
HELD = {"parameters": 800, "gathered": 0, "gradients": 400, "buckets": 300, "optimizer": 1600}


def rank_part(rank: int) -> Recorder:
    """Two steps: forward 0-500; backward 500-1500 with an all_reduce 700-1300, whose last 200 are
    waited for; optimizer 1500-1800."""
    made = Recorder()
    main = made.thread()
    lane = made.lane("comm", "reductions of stage 2")

    def span(name: str, category: str, begin: float, end: float, on: int = main, **args) -> None:
        made.spans.append(Span(name, category, on, round(begin * 1000), round(end * 1000), args))

    for step in range(2):
        t = step * STEP
        span("forward root", "forward", t, t + 500)
        span("backward root", "backward", t + 500, t + 1500)
        span("wait for all_reduce", "wait", t + 1100, t + 1300, comm="1.2", number=step)
        span("optimizer step", "step", t + 1500, t + 1800)
        begin = t + 700 + LATE * rank
        args = {
            "comm": "1.2",
            "number": step,
            "collective": "all_reduce",
            "algorithm": "ring",
            "elements": 1000,
            "bytes": 4000,
            "dtype": "float32",
            "tag": 0,
            "at": "train.py:7",
        }
        span(f"all_reduce #{step}", "collective", begin, t + 1300, lane, **args)
        rows = [*fuse(project(schedule("all_reduce", "ring", 2), rank))]
        for i, row in enumerate(rows):
            about = {"number": step, "round": row.round, "piece": 0, "bytes": 2000}
            first = begin + 100 * i
            span(row.name, "chunk", first, first + 100, lane, waited_us=50, **about)
        made.counters.append(Counter("memory of engine 0", t * 1000, HELD))
    made.fact("communicators", {**COMM, "transport": "shm", "link": None})
    formula = {"gathered_peak" if k == "gathered" else k: v for k, v in HELD.items()}
    made.fact("engines", {"counter": "memory of engine 0", "stage": 2, "formula": formula})
    plan = schedule("all_reduce", "ring", 2)
    rounds = [[list(map(int, t)) for t in ts] for ts in plan.rounds]
    about = {"collective": "all_reduce", "algorithm": "ring", "root": 0, "ranks": 2}
    made.fact("schedules", {**about, "chunks": plan.chunks, "rounds": rounds})
    return made


def trace(at: Path, missing: dict[str, str] | None = None) -> Path:
    """Writes the trace to that directory."""
    path = at / "run.json"
    parts = {}
    for rank in range(2):
        recorded = rank_part(rank)
        parts[rank] = part_path(path, "ab", rank)
        head = {"host": "h", "pid": 1, "clock_error_us": 0, "lost": 0, **recorded.facts}
        write_part(parts[rank], head, lines(recorded, rank, 0, Shift()))
    merge(path, parts, {"ranks": 2, "missing": missing or {}})
    return path
