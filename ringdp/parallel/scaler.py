"""Dynamic loss scaling: float16 gradients stay in range, and a step that overflowed is skipped.

The loss is multiplied by `scale`, the gradients by its inverse before the step. Where any gradient
on any rank is not finite, no rank steps, and the scale falls, from the `hysteresis`-th time since
it grew on; after `interval` good ones in a row it grows. Micikevicius et al. 2018; the defaults are
torch.amp.GradScaler's, which works as well (see `guards.sliced`).

What a backward made is judged and unscaled once, whoever steps then: several optimizers, or none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.parallel.clip import unscale_gradients
from ringdp.parallel.engine import Engine, check_engine


class LossScaler:
    """scale(loss).backward(), then step(optimizer); to clip, unscale_() before clipping.

    scale: at first. backoff, minimum, hysteresis: the `hysteresis`-th overflow since it grew, and
    each after that, multiplies it by `backoff`, to no less than `minimum`. growth, interval:
    `interval` good backwards in a row multiply it by `growth`. Raises UsageError for what is not
    allowed of these.
    """

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
        self.good, self.skipped = 0, 0  # finite since the last overflow or growth; overflows
        self.left = hysteresis  # overflows until the scale falls
        self._finite, self._judged = True, -1  # the latter: as `handed_out` was then

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.current

    def unscale_(self) -> bool:
        """Divide all gradients by the scale, once after a backward, and adapt the scale. Whether
        all are finite. Collective."""
        made = self.engine.reducing.handed_out
        if self._judged != made:
            self._finite = unscale_gradients(self.engine, self.current)
            self._judged = made
            self._adapt()
        return self._finite

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step it on all ranks or on none. Whether it stepped. Collective."""
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
            self.good, self.left = 0, max(self.left - 1, 0)
            if self.left == 0:
                self.current = max(self.current * self.backoff, self.minimum)

    def state_dict(self) -> dict[str, float]:
        """For `ringdp.save`'s extra: numbers alone, equal on all ranks."""
        return {
            "scale": self.current, "good": self.good, "skipped": self.skipped, "left": self.left
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.current = float(state["scale"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])
        self.left = int(state.get("left", self.hysteresis))
