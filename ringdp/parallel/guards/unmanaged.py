"""Finds parameters that belong to no unit, with which the ranks would silently diverge.

    another parameter   from load_state_dict(assign=True), or from a layer put in another's place
    a new parameter     from an adapter added to a layer
    a tensor            from functional_call, where masters are apart

They have no hooks: their gradients would not be reduced, and where masters are apart the next
gather would put the old parameters back. The model is searched when an iteration starts. A new
parameter that does not train is allowed; so is anything while no gradients are recorded (such as
averaged weights for evaluation), unless masters are apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ringdp.errors import UsageError
from ringdp.parallel.unit import FlatUnit


class Unmanaged:
    """Knows the parameters that `shard` was given, and their places in the model."""

    def __init__(self, model: nn.Module, units: Sequence[FlatUnit]) -> None:
        self.model, self.units = model, units
        self._ids: set[int] = set()
        self._at: dict[nn.Module, dict[str, tuple[int, int]]] = {}  # ids allowed in each place
        for unit in units:
            for where, p, c in zip(unit.places, unit.parameters, unit.computed, strict=True):
                self._ids.update(both := (id(p), id(c)))
                for module, name, _ in where:
                    self._at.setdefault(module, {})[name] = both

    def begin(self) -> None:
        """At the start of an iteration: `check`, and check the shapes of parameters that are never
        gathered."""
        self.check()
        for unit in self.units if torch.is_grad_enabled() else ():
            if unit.static and unit.widths.trainable:  # others settle when they are gathered
                unit.settle()

    def check(self) -> None:
        """Raise UsageError for a parameter that `shard` was not given."""
        if not (torch.is_grad_enabled() or any(unit.apart for unit in self.units)):
            return
        for module in self.model.modules():
            given = self._at.get(module, {})
            for name, p in module._parameters.items():
                if id(p) in (own := given.get(name, ())) or p is None:
                    continue
                if not isinstance(p, nn.Parameter):  # functional_call puts it there, for a while
                    if len(set(own)) == 2:  # the next gather puts its own in its place
                        raise self._error(module, name)
                    continue
                if name in given or (p.requires_grad and id(p) not in self._ids):
                    raise self._error(module, name)

    def _error(self, module: nn.Module, name: str) -> UsageError:
        within = next(n for n, m in self.model.named_modules() if m is module)
        return UsageError(
            f"parameter {within + '.' if within else ''}{name} is another than the model had at "
            "shard(), as after load_state_dict(assign=True) or where a layer is new: its gradient "
            "would not be reduced. Change the model before shard(), or values in place, as "
            "load_state_dict does without assign; use functional_call within full_parameters()"
        )
