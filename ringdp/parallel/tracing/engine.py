"""An engine in a trace: its gathers, prefetches, frees and reductions, and its units' compute.

    forward     from the unit's parameters being gathered to its outputs
    backward    from the first gradient of its outputs to the last of its parameters, or to the
                start of another unit's backward; the root's encloses all others
    recompute   a forward inside a backward, under activation checkpointing

An engine that does nothing while the trace runs does not appear in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ringdp.parallel.autograd_state import in_backward
from ringdp.parallel.engine import Engine
from ringdp.parallel.tracing.memory import MemoryTracer
from ringdp.parallel.tracing.patching import Patches
from ringdp.parallel.unit import FlatUnit
from ringdp.tape.recorder import Args, Recorder, Tracer, join

Group = Sequence[int]  # units of one module


class EngineTracer(Tracer):
    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self.engine, self.recorder = engine, recorder
        self._forwards: list[tuple[Group, int]] = []  # running, innermost last; start (ns)
        self._backwards: dict[int, int] = {}  # a group's first unit -> start (ns)
        self._memory = memory = MemoryTracer(engine, recorder, self._facts)
        engine.gathering.comm.label(f"gathers of stage {engine.stage.number}")
        engine.reducing.comm.label(f"reductions of stage {engine.stage.number}")
        if engine.reducing.replicas:
            engine.reducing.replicas.label("reductions over replicas")
        if near := engine.ledger.ranks.near:
            near.label("gathers of pieces")
        self._patches = patches = Patches()
        patches.after(engine.forwards, "before", self._forward_begins)
        patches.before(engine.forwards, "after", self._forward_ends)
        patches.after(engine.backwards, "reach", self._backward_begins)
        patches.before(engine.backwards, "reduce", self._unit_through)
        patches.before(engine.backwards, "end", self._backward_ends)
        patches.before(engine, "before_step", memory.steps)
        patches.after(engine.stepping, "leave", memory.stepped)
        for unit in engine.units:
            self._watch(unit)
        span = recorder.span
        patches.timed(
            engine.backwards, "_end", lambda since: span("wait for reductions", "finish", since)
        )
        patches.timed(
            engine.reducing,
            "start",
            lambda since, unit: span(f"reduce {_name(unit)}", "reduce", since, unit=unit.index),
        )
        for change in ("take", "give"):
            patches.after(engine.ledger, change, lambda *_: memory.count())

    def end(self) -> None:
        self._patches.off()
        self._memory.end()

    def _facts(self) -> Args:
        engine = self.engine
        return {
            "stage": engine.stage.number,
            "gathers": engine.gathering.comm._name,
            "reductions": engine.reducing.comm._name,
            "units": [
                {"name": _name(u), "elements": u.plan.elements, "bytes": u.bytes}
                for u in engine.units
            ],
            "formula": engine.memory_formula()._asdict(),
            "traffic": engine.traffic_formula(),
        }

    # --- compute

    def _forward_begins(self, indices: Group) -> None:
        self._memory.introduce()
        if 0 in indices and not in_backward():
            self._forwards.clear()  # of one that raised
            self._backwards.clear()
        self._forwards.append((indices, monotonic_ns()))

    def _forward_ends(self, indices: Group, *_: object) -> None:
        while self._forwards:
            group, since = self._forwards.pop()
            if group is indices:
                kind = "recompute" if in_backward() else "forward"
                self.recorder.span(f"{kind} {self._named(group)}", kind, since)
                return

    def _backward_begins(self, indices: Group) -> None:
        first = indices[0]
        if first in self._backwards:
            return
        gathering = self.engine.gathering
        for other in list(self._backwards):
            if not gathering.are_nested(first, other):
                self._end_backward(other)
        # A module that returns its child's output gets that gradient after the child does.
        callers = gathering.callers
        within = [since for other, since in self._backwards.items() if first in callers[other]]
        self._backwards[first] = min([monotonic_ns(), *(since - 1 for since in within)])

    def _unit_through(self, index: int) -> None:
        for group in self.engine.groups:
            if index in group and group[0] in self._backwards:
                self._end_backward(group[0])

    def _end_backward(self, first: int) -> None:
        since = self._backwards.pop(first)
        self.recorder.span(f"backward {self._named([first])}", "backward", since)

    def _backward_ends(self) -> None:
        for first in reversed(list(self._backwards)):  # those inside first
            self._end_backward(first)

    # --- units

    def _watch(self, unit: FlatUnit) -> None:
        name, span, patches = _name(unit), self.recorder.span, self._patches

        def gathered(since: int, *_: object) -> None:
            used = self.engine.gathering.in_use[-1:] == [unit.index]
            kind = "gather" if used else "prefetch"
            span(f"{kind} {name}", kind, since, unit=unit.index)

        freed = "free" if unit.freed else "reshard"
        patches.timed(unit, "gather", gathered)
        patches.timed(unit, "unshard", lambda since: span(f"unshard {name}", "unshard", since))
        patches.timed(unit, "reshard", lambda since: span(f"{freed} {name}", "free", since))

    def _named(self, group: Group) -> str:
        return _name(self.engine.units[group[0]])


class OptimizerTracer(Tracer):
    """Traces the steps of all optimizers."""

    def __init__(self, _: object, recorder: Recorder) -> None:
        began: list[int] = []  # ns, of the steps that run

        def begins(*_: object) -> None:
            began.append(monotonic_ns())

        def ended(*_: object) -> None:
            if began:  # else the trace began amid it
                recorder.span("optimizer step", "step", began.pop())

        self._handles = [
            register_optimizer_step_pre_hook(begins),
            register_optimizer_step_post_hook(ended),
        ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


def _name(unit: FlatUnit) -> str:
    return unit.plan.name or "root"


join(Optimizer, OptimizerTracer)
