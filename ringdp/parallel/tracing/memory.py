"""What an engine holds of each category while a trace runs, from the trace's start on.

The trace hears of an engine once it does something: one that is left over, or waits for its turn,
is not in it. The optimizer's state is weighed when there is more of it, since a look at every
tensor takes its time; what is there before the first step was there all along.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from ringdp.parallel.accounts import Accounts
from ringdp.parallel.memory import state_bytes
from ringdp.tape.recorder import Args, Counter, Recorder


class Held:
    """Of one engine. `facts`: what else the trace says of it."""

    def __init__(self, engine: Accounts, recorder: Recorder, facts: Callable[[], Args]) -> None:
        self._engine, self._recorder, self._facts = engine, recorder, facts
        self._ours = {id(p) for unit in engine.units for p in unit.parameters}
        self._states = WeakKeyDictionary[Optimizer, tuple[int, int]]()  # how many, their bytes
        self._state_bytes = 0  # of all of them
        self._optimizers: list[str] = []
        self._name = ""  # the counter's, once the engine is in the trace
        self._start = monotonic_ns(), self._now()

    def count(self) -> None:
        """Something has happened: what is held now."""
        self.introduce()
        self._recorder.count(self._name, self._now())

    def introduce(self) -> None:
        """The engine is in the trace."""
        if self._name:
            return
        self._name = f"memory of engine {len(self._recorder.facts.get('engines', ()))}"
        facts = {"counter": self._name, **self._facts(), "optimizers": self._optimizers}
        self._recorder.fact("engines", facts)
        self._recorder.counters.append(Counter(self._name, *self._start))

    def steps(self, optimizer: Optimizer) -> None:
        """An optimizer is about to."""
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
        """Bytes of its state that belong to the engine's parameters."""
        ours = [state for p, state in optimizer.state.items() if id(p) in self._ours]
        found = state_bytes(ours)
        self._states[optimizer] = len(optimizer.state), found
        self._state_bytes = sum(size for _, size in self._states.values())
        name = type(optimizer).__name__
        if found and name not in self._optimizers:
            self._optimizers.append(name)
        return found

    def _now(self) -> dict[str, int]:
        now = self._engine.ledger.now
        held = {name: now[name] for name in ("parameters", "gathered", "gradients", "buckets")}
        return {**held, "optimizer": self._state_bytes}
