"""Dynamic loss scaling: float16 gradients stay in range, and a step that overflowed is skipped.

The loss is multiplied by `scale`, the gradients by its inverse before the step. Where any gradient
on any rank is not finite, no rank steps, and the scale falls; after `interval` good steps in a row
it grows. Micikevicius et al. 2018; the defaults are torch.amp.GradScaler's, which works as well
(see `sliced`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.parallel.clip import unscale_gradients
from ringdp.parallel.engine import Engine
from ringdp.parallel.expected import check_engine


class LossScaler:
    """scale(loss).backward(), then step(optimizer); to clip, unscale_() before clipping."""

    def __init__(
        self,
        engine: Engine,
        *,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        minimum: float = 1.0,
    ) -> None:
        if not (minimum > 0 and scale >= minimum and growth >= 1 and 0 < backoff <= 1):
            raise UsageError(
                f"LossScaler(scale={scale}, growth={growth}, backoff={backoff}, minimum={minimum}):"
                " allowed: scale >= minimum > 0, growth >= 1, 0 < backoff <= 1"
            )
        check_engine("LossScaler", engine)
        self.engine, self.current = engine, scale
        self.growth, self.backoff, self.interval, self.minimum = growth, backoff, interval, minimum
        self.good, self.skipped = 0, 0  # steps since the last skip or growth; steps skipped
        self._finite: bool | None = None  # None: the gradients are still scaled

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.current

    def unscale_(self) -> bool:
        """Divide all gradients by the scale, once a step. Whether all are finite. Collective."""
        if self._finite is None:
            self._finite = unscale_gradients(self.engine, self.current)
        return self._finite

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step it on all ranks or on none, and adapt the scale. Whether it stepped. Collective."""
        good = self.unscale_()
        self._finite = None
        if good:
            optimizer.step()
            self.good += 1
            if self.good == self.interval:
                self.current, self.good = self.current * self.growth, 0
        else:
            self.skipped += 1
            self.current, self.good = max(self.current * self.backoff, self.minimum), 0
        return good

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.current, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.current = float(state["scale"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])
