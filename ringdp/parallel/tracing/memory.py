"""The memory that an engine holds while a trace runs, as a counter of bytes by category.

An engine enters the trace at its first event, with its memory at the trace's start. The optimizer's
state is measured only when it has grown, since that looks at every tensor; state that exists before
the first traced step counts from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from ringdp.parallel.accounting.memory import state_bytes
from ringdp.parallel.engine import Engine
from ringdp.tape.recorder import Args, Counter, Recorder


class MemoryTracer:
    """Counts one engine's memory. `facts`: what else the trace records of the engine."""

    def __init__(self, engine: Engine, recorder: Recorder, facts: Callable[[], Args]) -> None:
        self._engine, self._recorder, self._facts = engine, recorder, facts
        self._ours = {id(p) for unit in engine.units for p in unit.parameters}
        self._states = WeakKeyDictionary[Optimizer, tuple[int, int]]()  # (states, bytes)
        self._optimizers: list[str] = []
        self._name = ""  # the counter's, once the engine is in the trace
        self._start = monotonic_ns(), self._now()

    def count(self) -> None:
        self.introduce()
        self._recorder.count(self._name, self._now())

    def introduce(self) -> None:
        """Enter the engine into the trace, once."""
        if self._name:
            return
        self._name = f"memory of engine {len(self._recorder.facts.get('engines', ()))}"
        facts = {"counter": self._name, **self._facts(), "optimizers": self._optimizers}
        self._recorder.fact("engines", facts)
        self._recorder.counters.append(Counter(self._name, *self._start))

    def steps(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if optimizer in self._states:
            return
        found = self._weigh(optimizer)
        if found:
            self.introduce()
            for counter in self._recorder.counters:
                if counter.name == self._name:
                    counter.values["optimizer"] += found

    def stepped(self, optimizer: Optimizer) -> None:
        known = self._states.get(optimizer)  # None where the trace began amid its step
        if known and len(optimizer.state) != known[0] and self._weigh(optimizer):
            self.count()

    def end(self) -> None:
        if self._name:
            self._recorder.count(self._name, dict.fromkeys(self._now(), 0))

    def _weigh(self, optimizer: Optimizer) -> int:
        """Measure its state of the engine's parameters, in bytes."""
        ours = [state for p, state in optimizer.state.items() if id(p) in self._ours]
        found = state_bytes(ours)
        self._states[optimizer] = len(optimizer.state), found
        name = type(optimizer).__name__
        if found and name not in self._optimizers:
            self._optimizers.append(name)
        return found

    def _now(self) -> dict[str, int]:
        now = self._engine.ledger.now
        held = {name: now[name] for name in ("parameters", "gathered", "gradients", "buckets")}
        return {**held, "optimizer": sum(size for _, size in self._states.values())}
