"""Plans stages: bytes held and sent, the step's time, the largest model, and a recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ringdp.cli.bench.kernel_cases import CASES
from ringdp.cli.plan.hardware import Network
from ringdp.cli.plan.models import Model
from ringdp.cli.plan.step import Part, Step, predict
from ringdp.parallel.accounting.formula import Sharding, formula, traffic
from ringdp.parallel.accounting.memory import Memory
from ringdp.parallel.prefetch import one_unit
from ringdp.parallel.stages import stage_of
from ringdp.schedule.algorithms import Collective
from ringdp.schedule.cost import closed, seconds

RANK = 0  # the rank whose bytes are planned: it owns the least padding
PER_ELEMENT, PER_PARAMETER = 8, 4  # bytes of Adam's state in torch, in float32
FLOPS = 2  # of a forward, per parameter and token
MOST_RANKS = 65_536
ALIKE = 1e-3  # relative difference below which predicted times count as equal
EXACT = 1000  # the largest model is found to one part in EXACT


@dataclass(frozen=True)
class Setting:
    """What a plan is for. `tokens` is one rank's in one step."""

    ranks: int
    tokens: int
    memory: int  # bytes that a rank may hold
    flops: float  # per second, sustained
    bandwidth: float  # bytes/s of a rank's memory
    network: Network
    within: Network  # of a replica's ranks
    algorithm: str = "direct"
    replicas: int = 1  # in stages 1 to 3
    near: int | None = None  # a `reshard_size`, and the network of so many
    nearby: Network | None = None

    def sharding(self, model: Model, stage: int) -> Sharding:
        replicas = self.replicas if stage_of(stage).slices else 1
        return sharding(model, stage, self.ranks // replicas, replicas, self.near)


@dataclass(frozen=True)
class Row:
    """One stage. Bytes are one rank's."""

    stage: int
    memory: Memory
    sent: int
    step: Step
    largest: int  # elements of the largest such model that fits; 0 if none does
    fits: bool
    extrapolated: list[str]

    @property
    def total(self) -> int:
        return sum(self.memory)


def sharding(
    model: Model, stage: int, ranks: int, replicas: int = 1, near: int | None = None
) -> Sharding:
    """How the engine shards the model by default. `ranks`: of one replica; `near`: see Setting."""
    units, widths = model.layout(ranks, replicas), model.widths
    sizes = [w.compute * u.padded for u, w in zip(units, widths, strict=True)]
    limit = one_unit(sizes, model.groups)
    kept = range(len(units)) if near == 1 else ()  # as in `shard`
    pieces = [near or 0] * len(units)
    return Sharding(units, widths, model.groups, stage_of(stage), limit, kept, replicas, pieces)


def held(
    model: Model,
    stage: int,
    ranks: int,
    *,
    replicas: int = 1,
    near: int | None = None,
    yields: bool = False,
) -> Memory:
    """Bytes of one rank. `ranks`: of one replica; `near`: see Setting; `yields`: see Network."""
    return _held(sharding(model, stage, ranks, replicas, near), yields)


def _held(given: Sharding, yields: bool) -> Memory:
    return formula(given, RANK, yields=yields, per_element=PER_ELEMENT, per_parameter=PER_PARAMETER)


def row(model: Model, stage: int, setting: Setting) -> Row:
    given = setting.sharding(model, stage)
    each, replicas = given.each, given.replicas
    asked: set[tuple[Collective, int]] = set()
    within = setting.within if replicas > 1 else setting.network
    parts: dict[Part, tuple[int, Network]] = {
        "shards": (setting.ranks // replicas, within),
        "replicas": (replicas, setting.network),
        "near": (setting.near or 1, setting.nearby or within),
    }

    @cache
    def cost(collective: Collective, size: int, part: Part) -> float:
        if not size:
            return 0.0  # not called
        among = 0
        if setting.network.cores is not None:  # a step's buffers share the host's caches
            gathers = collective == "all_gather"
            among = sum(
                (w.compute if gathers else w.reduce * w.trainable) * u.padded for u, w in each
            )
        asked.add((collective, max(size, among)))
        n, over = parts[part]
        return seconds(
            closed(collective, setting.algorithm, n), over.of(collective), size, among=among
        )

    memory = _held(given, setting.network.yields)
    slices = given.stage.slices
    owned = sum(sum(u.owned(RANK)) if slices else u.elements for u, w in each if w.trainable)
    step = predict(
        given,
        cost=cost,
        wires={part: over.source for part, (_, over) in parts.items()},
        forward=[FLOPS * u.elements * setting.tokens / setting.flops for u in given.units],
        flatten=[(w.compute + w.reduce) * u.elements / setting.bandwidth for u, w in each],
        optimizer=4 * CASES["adamw"].moves * owned / setting.bandwidth,
        beside=setting.network.beside(setting.ranks),
    )
    return Row(
        stage=stage,
        memory=memory,
        sent=traffic(given),
        step=step,
        largest=largest(model, stage, setting),
        fits=sum(memory) <= setting.memory,
        extrapolated=setting.network.beyond(
            {c for c, _ in asked}, setting.ranks, {size for _, size in asked}
        ),
    )


def fits(model: Model, stage: int, setting: Setting) -> bool:
    return sum(_held(setting.sharding(model, stage), setting.network.yields)) <= setting.memory


def largest(model: Model, stage: int, setting: Setting) -> int:
    """Elements of the largest model that fits, when all parameters are scaled alike."""
    low, high = 0, model.elements
    while fits(model.scaled(high), stage, setting):
        low, high = high, 2 * high
    while high - low > max(low // EXACT, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(model.scaled(middle), stage, setting) else (low, middle)
    return low


def recommend(rows: Sequence[Row], model: Model, setting: Setting) -> str:
    """Name the lowest of the fastest stages that fit, or else the ranks that it would take."""
    fitting = [r for r in rows if r.fits]
    if fitting:
        least_time = min(r.step.total for r in fitting) * (1 + ALIKE)
        best = min((r for r in fitting if r.step.total <= least_time), key=lambda r: r.stage)
        others = [r for r in rows if not r.fits]
        without = f"; {_stages(others)} not fit" if others else ""
        return f"stage {best.stage}: the least predicted time among those that fit{without}"
    least = min(rows, key=lambda r: r.total)
    ranks = setting.ranks // setting.replicas
    of = "ranks a replica" if setting.replicas > 1 else "ranks"
    while 2 * ranks <= MOST_RANKS:
        ranks *= 2
        if fits(model, least.stage, replace(setting, ranks=ranks, replicas=1)):
            return f"none fits; stage {least.stage} would with {ranks} {of}"
    return f"none fits; nor would stage {least.stage} with up to {ranks} {of}"


def _stages(rows: Sequence[Row]) -> str:
    names = ", ".join(str(r.stage) for r in rows)
    return f"stage {names} does" if len(rows) == 1 else f"stages {names} do"
