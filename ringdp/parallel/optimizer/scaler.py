"""Dynamic loss scaling: float16 gradients stay in range, and a step that overflowed is skipped.

The loss is multiplied by the scale, and the gradients by its inverse before the step. If any
gradient on any rank is not finite, no rank steps, and the scale falls (from the `hysteresis`-th
overflow after it grew). After `interval` finite backwards in a row it grows. Micikevicius et al.
2018; the defaults are those of torch.amp.GradScaler, which works as well (see `guards.sliced`).

The gradients of a backward are checked and unscaled once, however many optimizers step after it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.parallel.engine import Engine, check_engine
from ringdp.parallel.optimizer.clip import unscale_gradients


class LossScaler:
    """scale(loss).backward(), then step(optimizer); to clip, unscale_() before clipping.

    scale: the initial one. backoff, minimum, hysteresis: from the `hysteresis`-th overflow after it
    grew on, each multiplies it by `backoff`, down to `minimum`. growth, interval: `interval` finite
    backwards in a row multiply it by `growth`. Raises UsageError for values out of bounds.
    """

    start = 0  # of `good`

    def __init__(
        self,
        engine: Engine,
        *,
        scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        minimum: float = 1.0,
        hysteresis: int = 1,
    ) -> None:
        sizes = math.inf > scale >= minimum > 0 and math.inf > growth >= 1 >= backoff > 0
        if not (sizes and all(isinstance(n, int) and n >= 1 for n in (interval, hysteresis))):
            raise UsageError(
                f"LossScaler(scale={scale}, growth={growth}, backoff={backoff}, interval={interval}"
                f", minimum={minimum}, hysteresis={hysteresis}): allowed: scale >= minimum > 0, "
                "growth >= 1, both finite, 0 < backoff <= 1, and a whole interval and hysteresis "
                "of at least 1"
            )
        check_engine("LossScaler", engine)
        self.engine, self.current = engine, scale
        self.growth, self.backoff, self.interval, self.minimum = growth, backoff, interval, minimum
        self.hysteresis = hysteresis
        self.good = self.start  # finite since the last overflow or growth
        self.skipped = 0  # overflows
        self.left = hysteresis  # overflows until the scale falls
        self._finite, self._judged = True, -1  # the latter: `handed_out` at the last check

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.current

    def unscale_(self) -> bool:
        """Divide all gradients by the scale and adapt the scale, once per backward. Returns whether
        all are finite. Collective."""
        made = self.engine.reducing.handed_out
        if self._judged != made:
            self._finite = unscale_gradients(self.engine, self.current)
            self._judged = made
            self._adapt()
        return self._finite

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer on all ranks or on none. Returns whether it stepped. Collective."""
        good = self.unscale_()
        if good:
            optimizer.step()
        return good

    def _adapt(self) -> None:
        if self._finite:
            self.good += 1
            if self.good == self.interval:
                self.current, self.good = self.current * self.growth, 0
                self.left = self.hysteresis
        else:
            self.skipped += 1
            self.good, self.left = self.start, max(self.left - 1, 0)
            if self.left == 0:
                self.current = max(self.current * self.backoff, self.minimum)

    def state_dict(self) -> dict[str, float]:
        """Numbers only, equal on all ranks: fits `ringdp.save(extra=...)`."""
        return {
            "scale": self.current, "good": self.good, "skipped": self.skipped, "left": self.left
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.current = float(state["scale"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])
        self.left = int(state.get("left", self.hysteresis))
