"""Condenses a trace for the page: each name once, numbers in lists, times in µs with ns digits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

from ringdp.cli.plan.hardware import Network, from_files
from ringdp.cli.timeline import collectives
from ringdp.cli.timeline.collectives import Key, Kind, Whole, end
from ringdp.cli.timeline.read import FORMULA, HELD, Run
from ringdp.errors import UsageError
from ringdp.schedule import Schedule, html, schedule
from ringdp.schedule.cost import Price
from ringdp.tape.chrome import Event

COMPUTE = ("forward", "backward", "recompute", "step")
ENGINE = ("gather", "prefetch", "unshard", "free", "reduce", "finish")
Interval = tuple[float, float]  # (begin, end)
Names = defaultdict[str, int]  # numbers each text in order of appearance
ADAMS = {"Adam", "AdamW"}  # the optimizers that the memory formula describes


class Share(NamedTuple):
    """How one rank spent its time, in µs.

    total          from its first span to its last
    compute        without waits and the engine's own work
    engine         gathers, frees and reductions, without waits
    communication  collectives, from the moment that every rank has begun them
    hidden         the part of communication for which the rank did not wait
    exposed        the part of communication for which it waited
    late           waits for ranks that had not begun a collective
    """

    rank: int
    total: float
    compute: float
    engine: float
    communication: float
    hidden: float
    exposed: float
    late: float


def digest(
    run: Run, bench: str | None = None, tell: Callable[[str], object] = str
) -> dict[str, Any]:
    """`bench` names files with α β γ, to use instead of what `collectives.network` finds."""
    tell("matching collectives")
    wholes = collectives.match(run)
    told = collectives.schedules(run)
    priced = collectives.prices({w.kind for w in wholes}, told)
    over = from_files(bench) if bench else collectives.network(run, wholes, priced)
    names: Names = defaultdict(count().__next__)
    tell("laying out lanes")
    lanes = [*_lanes(run, names)]
    tell("laying out chunks")
    chunks = _chunks(run, wholes, names)
    events, came = by_rank(run), {w.key: w.came for w in wholes}
    return {
        "ranks": run.ranks,
        "notes": [*_notes(run)],
        "names": list(names),
        "lanes": lanes,
        "waits": {rank: _waits(events[rank]) for rank in sorted({e["pid"] for e in run.events})},
        "shares": [share(rank, events[rank], came)._asdict() for rank in run.parts],
        "memory": [*_memory(run, events)],
        "collectives": [_collective(w, over, priced) for w in wholes],
        "chunks": chunks,
        "model": over and {**over.machine._asdict(), "source": over.source},
        **_replays(wholes, told, tell),
    }


def by_rank(run: Run) -> Mapping[int, list[Event]]:
    """The events of each rank; empty for a rank without any."""
    found = defaultdict[int, list[Event]](list)
    for event in run.events:
        found[event["pid"]].append(event)
    return found


def share(rank: int, events: Iterable[Event], came: Mapping[Key, float]) -> Share:
    """`came` says when the last rank began each collective."""
    spans = defaultdict[str, list[Interval]](list)
    for e in events:
        if e["ph"] != "X":
            continue
        begin, ended = float(e["ts"]), end(e)
        spans[e["cat"]].append((begin, ended))
        if e["cat"] == "collective":
            last = came[e["args"]["comm"], e["args"]["number"]]
            # The root of a broadcast may finish before the last rank begins: it waits for nobody.
            spans["all there"].append((last if begin < last < ended else begin, ended))

    def of(*categories: str) -> list[Interval]:
        return union(chain.from_iterable(spans[c] for c in categories))

    def busy(*categories: str) -> float:
        return length(of(*categories)) - length(overlap(of(*categories), waits))

    moves, waits = of("all there"), of("wait")
    every = of(*spans)
    total = every[-1][1] - every[0][0] if every else 0.0
    exposed = length(overlap(moves, waits))
    late = length(overlap(of("collective"), waits)) - exposed
    engine = busy(*ENGINE)
    compute = busy(*COMPUTE, *ENGINE) - engine
    hidden = length(moves) - exposed
    return Share(rank, total, compute, engine, length(moves), hidden, exposed, late)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as sorted, disjoint intervals."""
    joined: list[Interval] = []
    for begin, ended in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        else:
            joined.append((begin, ended))
    return joined


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The moments in both. All lists are sorted and disjoint."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, ended = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < ended:
            found.append((begin, ended))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    return sum(ended - begin for begin, ended in intervals)


def _waits(events: Iterable[Event]) -> list[list[float]]:
    """The intervals in which the rank waits."""
    waits = union((float(e["ts"]), end(e)) for e in events if e["ph"] == "X" and e["cat"] == "wait")
    return [[_us(begin), _us(ended)] for begin, ended in waits]


def _lanes(run: Run, names: Names) -> Iterable[dict[str, Any]]:
    titles, spans = {}, dict[tuple[int, int], list[Event]]()
    for event in run.events:
        lane = event["pid"], event.get("tid", 0)
        if event["ph"] == "M" and event["name"] == "thread_name":
            titles[lane] = event["args"]["name"]
        elif event["ph"] == "X" and event["cat"] != "chunk":
            spans.setdefault(lane, []).append(event)

    def order(lane: tuple[int, int]) -> tuple[object, ...]:
        title = titles.get(lane, "")  # lane numbers depend on who came first
        return lane[0], title != "main thread", title, lane[1]

    for lane in sorted(spans, key=order):
        spans[lane].sort(key=lambda e: (e["ts"], -e["dur"]))
        yield {
            "rank": lane[0],
            "title": titles.get(lane, ""),
            "spans": [
                [names[e["name"]], names[e["cat"]], _us(e["ts"]), _us(e["dur"]), _where(e, names)]
                for e in spans[lane]
            ],
        }


def _where(event: Event, names: Names) -> int:
    """The user's line that called it, as a number in `names`; -1 if there is none."""
    return names[event["args"]["at"]] if event["cat"] == "collective" else -1


def _collective(whole: Whole, over: Network | None, priced: Mapping[Kind, Price]) -> dict[str, Any]:
    guess = collectives.predicted(whole.kind, over, priced)
    span = next(iter(whole.spans.values()))
    return {
        **whole.kind._asdict(),
        "comm": whole.key[0],
        "number": whole.key[1],
        "name": span["name"],
        "at": span["args"]["at"],
        "begin": _us(whole.begin),
        "measured": _us(whole.measured),
        "late": _us(whole.late),
        "lateRank": whole.late_rank,
        "predicted": None if guess is None else _us(guess),
        "whole": len(whole.spans) == whole.kind.ranks,
        "failed": any(e["args"].get("failed") for e in whole.spans.values()),
    }


def _chunks(run: Run, wholes: list[Whole], names: Names) -> list[list[list[float]]]:
    """Each collective's chunks: [rank, name, begin, duration, round, piece, waited, bytes]."""
    comms = {(rank, c["lane"]): c["name"] for rank, c in run.facts("communicators")}
    places: dict[Key, int] = {w.key: i for i, w in enumerate(wholes)}
    found: list[list[list[float]]] = [[] for _ in wholes]
    for e in run.events:
        if e.get("cat") != "chunk":
            continue
        about = e["args"]
        at = places.get((comms.get((e["pid"], e["tid"]), ""), about["number"]))
        if at is not None:
            row = [e["pid"], names[e["name"]], _us(e["ts"]), _us(e["dur"]), about["round"]]
            found[at].append([*row, about["piece"], about.get("waited_us", 0), about["bytes"]])
    return found


def _memory(run: Run, events: Mapping[int, list[Event]]) -> Iterable[dict[str, Any]]:
    for rank, engine in run.facts("engines"):
        points = [
            [_us(e["ts"]), *(e["args"][c] for c in HELD)]
            for e in events[rank]
            if e["ph"] == "C" and e["name"] == engine["counter"]
        ]
        if not points:
            continue
        formula, adams = engine["formula"], ADAMS.issuperset(engine.get("optimizers") or ADAMS)
        yield {
            "rank": rank,
            "stage": engine["stage"],
            "optimizers": " and ".join(engine.get("optimizers") or ()),
            "points": sorted(points),
            "formula": [
                formula[FORMULA.get(c, c)] if c != "optimizer" or adams else None for c in HELD
            ],
        }


def _notes(run: Run) -> Iterable[str]:
    yield from run.missing.values()
    for rank, part in run.parts.items():
        if part["lost"]:
            yield f"rank {rank} had no room for {part['lost']:,} spans"
        if part["clock_error_us"]:
            yield (
                f"rank {rank} is on another host, {part['host']}: its times are right to "
                f"{part['clock_error_us']:.1f} µs"
            )


def _replays(
    wholes: list[Whole], told: Mapping[Any, Schedule], tell: Callable[[str], object]
) -> dict[str, dict[str, str]]:
    """A replay of each all_reduce algorithm, by `algorithm on ranks`; or why there is none."""
    pages, unplayed = dict[str, str](), dict[str, str]()
    kinds = {w.kind[:3] for w in wholes if w.kind.collective == "all_reduce"}
    for collective, algorithm, ranks in sorted(kinds):
        tell(f"replaying {algorithm} on {ranks} ranks")
        name = f"{algorithm} on {ranks}"
        try:
            plan = told.get((collective, algorithm, ranks)) or schedule(
                "all_reduce", algorithm, ranks
            )
            pages[name] = html(plan, "all_reduce", title=f"{algorithm} all_reduce on {ranks} ranks")
        except UsageError as error:  # too many slots for a page, or a library's own algorithm
            unplayed[name] = str(error)
    return {"replays": pages, "unplayed": unplayed}


def _us(value: float) -> float:
    return round(float(value), 3)
