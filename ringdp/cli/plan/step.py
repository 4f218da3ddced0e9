"""Predicts the time of one step: simulates the engine's gathers, compute and reductions.

There are several clocks. One is compute's. The others are the networks', each of which carries one
collective at a time, in the order in which the engine issues them: replicas' all_reduces may cross
another than gathers do. Compute waits for the gathers of what it uses. A reduction from a shared
bucket waits, once the bucket is full, for the reduction before it. The optimizer waits for all of
them. Time for which compute waits is exposed; the rest of the networks' time is hidden. If the
cores that compute also move the bytes, as in shared memory, nothing is hidden.

Leaves out the slowdown of kernels by concurrent collectives, and the host's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from ringdp.parallel.accounting.formula import Sharding
from ringdp.schedule.algorithms import Collective

Part = Literal["shards", "replicas", "near"]  # of the ranks, as in `ringdp.parallel.ranks`
Cost = Callable[[Collective, int, Part], float]  # in s, of a buffer of this many bytes


class Step(NamedTuple):
    """The parts of a step, in seconds."""

    compute: float
    communication: float
    exposed: float
    optimizer: float

    @property
    def hidden(self) -> float:
        return max(self.communication - self.exposed, 0.0)  # rounding may differ

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.optimizer


class _Clocks:
    """The clocks of compute, `now`, and of the wires, by name."""

    def __init__(self, *, beside: bool) -> None:
        self.beside = beside
        self.now = self.compute = self.busy = self.exposed = 0.0
        self.wires = defaultdict[str, float](float)

    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.compute += seconds

    def send(self, seconds: float, wire: str, after: float = 0.0) -> float:
        """Send after what is on the wire, and `after` a time; return when it ends."""
        self.wires[wire] = ends = max(self.wires[wire], self.now, after) + seconds
        self.busy += seconds
        if not self.beside:
            self.wait(ends)
        return ends

    def wait(self, until: float) -> None:
        self.exposed += max(until - self.now, 0.0)
        self.now = max(until, self.now)


def predict(
    given: Sharding,
    *,
    cost: Cost,
    wires: Mapping[Part, str] | None = None,
    forward: Sequence[float],
    flatten: Sequence[float],
    optimizer: float,
    beside: bool = True,
) -> Step:
    """Simulate one step.

    Times are in s. `wires`: the network of each part of the ranks, by default one. `forward` has
    each unit's forward; a backward takes twice as long. `flatten` has the flattening of each unit's
    gradients, which counts as compute. `beside` says whether collectives run during compute.
    """
    clocks = _Clocks(beside=beside)
    each, groups, stage = given.each, given.groups, given.stage
    ready = [0.0] * len(each)  # when a unit's gather ends
    reduced = 0.0  # when the last reduction so far ends

    def send(collective: Collective, size: int, part: Part, after: float = 0.0) -> float:
        return clocks.send(cost(collective, size, part), (wires or {}).get(part, ""), after)

    def reduce(unit: int) -> None:
        nonlocal reduced
        layout, widths = each[unit]
        if not widths.trainable:
            return
        clocks.spend(flatten[unit])
        if not widths.keeps_bucket(stage):
            clocks.wait(reduced)
        reduced = send(stage.reduction, widths.reduce * layout.padded, "shards")
        if given.replicas > 1:
            reduced = send("all_reduce", widths.reduce * layout.shard, "replicas", reduced)

    for what, which in given.iteration():
        if what in ("gather", "gather_near") and stage.gathers:
            layout, widths = each[which]
            part: Part = "near" if what == "gather_near" else "shards"
            ready[which] = send("all_gather", widths.compute * layout.padded, part)
        elif what == "use":
            clocks.wait(ready[which])
        elif what == "forward":
            clocks.spend(sum(forward[u] for u in groups[which]))
        elif what == "backward":
            clocks.spend(2 * sum(forward[u] for u in groups[which]))
            for unit in groups[which] if which else ():
                reduce(unit)
    for unit in reversed(groups[0]):
        reduce(unit)
    clocks.wait(reduced)
    return Step(clocks.compute, clocks.busy, clocks.exposed, optimizer)
