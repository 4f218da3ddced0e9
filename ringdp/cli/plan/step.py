"""How long one step takes: the engine's order of gathers, compute and reductions, on two clocks.

One clock computes; the other is the wire, which carries one collective at a time in the order in
which the engine issues them. Compute waits for the gather of what it uses; a reduction without a
bucket of its own waits for the one before; the optimizer waits for all. What compute waits for is
exposed, the rest of the wire's time is hidden. Where the cores that compute also move the bytes, as
in shared memory, there is one clock: nothing is hidden.

Leaves out: kernels that collectives and compute take from one another, the host's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringdp.parallel.layout import Unit
from ringdp.parallel.memory import Widths
from ringdp.parallel.prefetch import Groups, ahead, forecast
from ringdp.parallel.stages import Keep, Stage
from ringdp.schedule.algorithms import Collective

Cost = Callable[[Collective, int], float]  # of a buffer of so many bytes, in s


class Step(NamedTuple):
    """Seconds."""

    compute: float
    communication: float
    exposed: float
    optimizer: float

    @property
    def hidden(self) -> float:
        return max(self.communication - self.exposed, 0.0)  # their rounding may differ

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.optimizer


class _Replay:
    """The two clocks, and which units are gathered."""

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Groups,
        stage: Stage,
        widths: Sequence[Widths],
        limit: int,
        cost: Cost,
        beside: bool,
    ) -> None:
        self.stage, self.widths, self.limit, self.cost = stage, widths, limit, cost
        self.beside = beside
        self.order = forecast(groups)
        self.gathered = [w.compute * u.padded for u, w in zip(units, widths, strict=True)]
        self.reduced = [w.reduce * u.padded for u, w in zip(units, widths, strict=True)]
        self.freed = stage.parameters is Keep.SHARD
        # What is not freed takes no memory to gather, so nothing bounds how far ahead.
        self.sizes = self.gathered if self.freed else [0] * len(units)
        every = range(len(units))
        self.sharded = set(every) if stage.gathers else set[int]()
        self.ready = dict.fromkeys(every, 0.0)  # when a unit's gather ends
        self.waiting: set[int] = set()
        self.now = self.wire = self.busy = self.exposed = 0.0
        self.last_reduced = 0.0  # when the last reduction so far ends

    def use(self, unit: int, position: int) -> None:
        if unit in self.sharded:
            self._gather(unit)
        self.waiting.discard(unit)
        self._prefetch(position, unit)
        self._wait(self.ready[unit])

    def free(self, unit: int, position: int) -> None:
        if self.freed:
            self.sharded.add(unit)
            self._prefetch(position, None)

    def make_room(self, unit: int) -> None:
        if not self.widths[unit].keeps_bucket(self.stage):
            self.finish()

    def reduce(self, unit: int) -> None:
        self.last_reduced = self._send(self.cost(self.stage.reduction, self.reduced[unit]))

    def finish(self) -> None:
        self._wait(self.last_reduced)

    def _gather(self, unit: int) -> None:
        self.ready[unit] = self._send(self.cost("all_gather", self.gathered[unit]))
        self.sharded.discard(unit)

    def _prefetch(self, position: int, in_use: int | None) -> None:
        found = ahead(
            self.order,
            position,
            in_use=in_use,
            sharded=self.sharded,
            in_flight=sum(self.sizes[u] for u in self.waiting),
            sizes=self.sizes,
            limit=self.limit,
        )
        for unit in found:
            self._gather(unit)
            self.waiting.add(unit)

    def _send(self, seconds: float) -> float:
        self.wire = max(self.wire, self.now) + seconds
        self.busy += seconds
        if not self.beside:
            self._wait(self.wire)
        return self.wire

    def _wait(self, until: float) -> None:
        self.exposed += max(until - self.now, 0.0)
        self.now = max(until, self.now)


def predict(
    units: Sequence[Unit],
    groups: Groups,
    stage: Stage,
    *,
    widths: Sequence[Widths],
    limit: int,
    cost: Cost,
    forward: Sequence[float],
    flatten: Sequence[float],
    optimizer: float,
    beside: bool = True,
) -> Step:
    """`forward`: s of each unit; a backward takes twice that. `flatten`: s of its gradients,
    counted as compute. `optimizer`: s of its step. `beside`: whether collectives go on meanwhile.

    The root's forward is taken to run after those of all others, its backward before theirs.
    """
    replay = _Replay(units, groups, stage, widths, limit, cost, beside)
    root, *inner = groups
    position, compute = -1, 0.0

    def spend(seconds: float) -> None:
        nonlocal compute
        replay.now += seconds
        compute += seconds

    def run(group: Sequence[int], times: int) -> None:
        spend(times * sum(forward[u] for u in group))

    def reduce(unit: int) -> None:
        if widths[unit].trainable:
            replay.make_room(unit)
            spend(flatten[unit])
            replay.reduce(unit)

    def use(group: Sequence[int]) -> None:
        nonlocal position
        for unit in group:
            position += 1
            replay.use(unit, position)

    use(root)
    for group in inner:
        use(group)
        run(group, 1)
        for unit in group:
            replay.free(unit, position)
    run(root, 1)
    use(root)
    run(root, 2)
    for group in reversed(inner):
        use(group)
        run(group, 2)
        for unit in group:
            reduce(unit)
            replay.free(unit, position)
    for unit in reversed(root):
        reduce(unit)
    replay.finish()
    return Step(compute, replay.busy, replay.exposed, optimizer)
