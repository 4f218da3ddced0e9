"""Predicts the time of one step: simulates the engine's gathers, compute and reductions.

There are two clocks. One is compute's; the other is the wire's, which carries one collective at a
time, in the order in which the engine issues them. Compute waits for the gathers of what it uses. A
reduction from a shared bucket waits, once the bucket is full, for the reduction before it. The
optimizer waits for all of them. Time for which compute waits is exposed; the rest of the wire's
time is hidden. If the cores that compute also move the bytes, as in shared memory, nothing is
hidden. Replicas' all_reduces wait for the wire, too, though it may be another.

Leaves out the slowdown of kernels by concurrent collectives, and the host's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringdp.parallel.accounting.formula import Sharding
from ringdp.schedule.algorithms import Collective

Cost = Callable[[Collective, int], float]  # in s, of a buffer of this many bytes


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
    """The clocks of compute, `now`, and of the wire."""

    def __init__(self, *, beside: bool) -> None:
        self.beside = beside
        self.now = self.wire = self.compute = self.busy = self.exposed = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.compute += seconds

    def send(self, seconds: float) -> float:
        """Send after what is on the wire; return when it ends."""
        self.wire = max(self.wire, self.now) + seconds
        self.busy += seconds
        if not self.beside:
            self.wait(self.wire)
        return self.wire

    def wait(self, until: float) -> None:
        self.exposed += max(until - self.now, 0.0)
        self.now = max(until, self.now)


def predict(
    given: Sharding,
    *,
    cost: Cost,
    nearby: Cost | None = None,
    forward: Sequence[float],
    flatten: Sequence[float],
    optimizer: float,
    beside: bool = True,
) -> Step:
    """Simulate one step.

    Times are in s. `nearby`: the cost among ranks that gather pieces. `forward` has each unit's
    forward; a backward takes twice as long. `flatten` has the flattening of each unit's gradients,
    which counts as compute. `beside` says whether collectives run during compute.
    """
    clocks = _Clocks(beside=beside)
    each, groups, stage = given.each, given.groups, given.stage
    ready = [0.0] * len(each)  # when a unit's gather ends
    reduced = 0.0  # when the last reduction so far ends

    def reduce(unit: int) -> None:
        nonlocal reduced
        layout, widths = each[unit]
        if not widths.trainable:
            return
        clocks.spend(flatten[unit])
        if not widths.keeps_bucket(stage):
            clocks.wait(reduced)
        reduced = clocks.send(cost(stage.reduction, widths.reduce * layout.padded))
        if given.replicas > 1:
            reduced = clocks.send(cost("all_reduce", widths.reduce * layout.shard))

    for what, which in given.iteration():
        if what in ("gather", "gather_near") and stage.gathers:
            layout, widths = each[which]
            of = nearby if nearby and what == "gather_near" else cost
            ready[which] = clocks.send(of("all_gather", widths.compute * layout.padded))
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
