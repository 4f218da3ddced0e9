"""The collectives of a run, matched over all ranks, and the cost model's predictions.

measured   from the last rank's begin to the last rank's end
late       from the first rank's begin to the last rank's begin: some rank came late
predicted  by `schedule.cost`, with α β γ from bench files or fitted to the run itself
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from ringdp.cli.plan.hardware import Network
from ringdp.cli.timeline.read import Run
from ringdp.errors import ScheduleError, UsageError
from ringdp.schedule import Schedule, Transfer, verify
from ringdp.schedule.cost import Machine, Price, closed, fit, price, seconds
from ringdp.tape.chrome import Event

Key = tuple[str, int]  # communicator, number


class Kind(NamedTuple):
    """Collectives of one kind should take equally long."""

    collective: str
    algorithm: str
    ranks: int
    bytes: int


class Whole(NamedTuple):
    """One collective. `spans` has each rank's event. Times are in µs."""

    key: Key
    kind: Kind
    spans: dict[int, Event]

    @property
    def begin(self) -> float:
        """When the first rank began."""
        return min(float(e["ts"]) for e in self.spans.values())

    @property
    def came(self) -> float:
        """When the last rank began."""
        return max(float(e["ts"]) for e in self.spans.values())

    @property
    def measured(self) -> float:
        return max(map(end, self.spans.values())) - self.came

    @property
    def late(self) -> float:
        return self.came - self.begin

    @property
    def late_rank(self) -> int:
        return max(self.spans, key=lambda rank: float(self.spans[rank]["ts"]))


def end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def match(run: Run) -> list[Whole]:
    """Group the events of each collective, in the order in which the collectives began."""
    sizes = {
        (rank, c["name"]): len(c["ranks"]) or run.ranks for rank, c in run.facts("communicators")
    }
    found: dict[Key, Whole] = {}
    for event in run.events:
        if event.get("cat") != "collective":
            continue
        about, rank = event["args"], event["pid"]
        key = about["comm"], about["number"]
        if key not in found:
            size = sizes.get((rank, about["comm"]), run.ranks)
            kind = Kind(about["collective"], about["algorithm"], size, about["bytes"])
            found[key] = Whole(key, kind, {})
        found[key].spans[rank] = event
    return sorted(found.values(), key=lambda w: w.begin)


def schedules(run: Run) -> dict[tuple[str, str, int], Schedule]:
    """The run's schedules with root 0, by (collective, algorithm, ranks)."""
    return {
        (s["collective"], s["algorithm"], s["ranks"]): _proved(s)
        for _, s in run.facts("schedules")
        if s["root"] == 0
    }


def _proved(said: Mapping[str, Any]) -> Schedule:
    try:
        rounds = tuple(tuple(map(_transfer, transfers)) for transfers in said["rounds"])
        plan = Schedule(said["ranks"], said["chunks"], rounds)
        verify(plan, said["collective"])
    except (ScheduleError, UsageError, TypeError, ValueError, KeyError, IndexError) as error:
        raise UsageError(
            f"the trace is damaged: its schedule {said['algorithm']!r} is no {said['collective']!r}"
        ) from error
    return plan


def _transfer(numbers: Sequence[int]) -> Transfer:
    src, dst, read, write, reduce = numbers
    return Transfer(src, dst, read, write, reduce=bool(reduce))


def prices(kinds: Iterable[Kind], told: Mapping[Any, Schedule]) -> dict[Kind, Price]:
    """The prices of those kinds that have one."""
    found = {}
    for kind in kinds:
        plan = told.get(kind[:3])
        try:
            found[kind] = price(plan) if plan else closed(*kind[:3])  # type: ignore[arg-type]
        except UsageError:
            continue
    return found


def medians(wholes: Sequence[Whole]) -> dict[Kind, float]:
    """Median times in µs, of collectives that every rank has finished."""
    times: dict[Kind, list[float]] = {}
    for whole in wholes:
        if len(whole.spans) == whole.kind.ranks:
            times.setdefault(whole.kind, []).append(whole.measured)
    return {kind: median(found) for kind, found in times.items()}


def network(run: Run, wholes: Sequence[Whole], priced: Mapping[Kind, Price]) -> Network | None:
    """The emulated link's terms, if all communicators have the same link; else a fit to this run.

    Such a fit only shows which collectives are out of line.
    """
    links = [c.get("link") for _, c in run.facts("communicators")]
    link = links[0] if links else None
    if link and all(other == link for other in links):
        machine = Machine(link["latency"], 1 / link["bandwidth"], 0.0)
        return Network(machine, "the emulated link's α and β")
    rows = [
        (priced[kind], kind.bytes, us / 1e6)
        for kind, us in medians(wholes).items()
        if kind in priced and us > 0 and kind.bytes > 0 and any(priced[kind])
    ]
    if not rows:
        return None
    return Network(fit(rows), "fitted to this run's own medians, so it shows outliers, not speed")


def predicted(kind: Kind, over: Network | None, priced: Mapping[Kind, Price]) -> float | None:
    """The predicted time in µs; None if there is no price."""
    if over is None or kind not in priced:
        return None
    return seconds(priced[kind], over.of(kind.collective), kind.bytes) * 1e6
