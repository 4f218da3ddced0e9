"""The learning rates that a DeepSpeed config's `scheduler` names: DeepSpeed's, or torch's.

    WarmupLR        rises from warmup_min_lr to warmup_max_lr in warmup_num_steps, and stays
    WarmupDecayLR   then falls in a line, to warmup_min_lr at total_num_steps
    WarmupCosineLR  rises from warmup_min_ratio of each group's lr to all of it, then falls as a
                    cosine, to cos_min_ratio of it at total_num_steps

With warmup_type "log" the rise is as log(step), with "linear" as step. As in DeepSpeed a warm-up's
first two steps of the optimizer are both at its start, but a WarmupCosineLR's first is at 0.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer, lr_scheduler


class WarmupLR(lr_scheduler.LRScheduler):
    """`warmup_max_lr`: by default each group's lr. Raises ValueError."""

    total: int | None = None  # the step at which it has fallen, if it falls

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | None = None,
        warmup_max_lr: float | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        if warmup_type not in ("log", "linear") or warmup_num_steps < 1:
            raise ValueError("allowed: warmup_type 'log' or 'linear', at least 1 warmup_num_steps")
        self.low, self.high = float(warmup_min_lr or 0.0), warmup_max_lr
        self.rising, self.linear = max(2, warmup_num_steps), warmup_type == "linear"
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        share = self._share(self.last_epoch - 1)
        highs = [lr if self.high is None else self.high for lr in self.base_lrs]
        return [self.low + (high - self.low) * share for high in highs]

    def _share(self, step: int) -> float:
        """The share of the way from low to high at `step`."""
        if step < self.rising:
            step = max(step, 0)
            return step / self.rising if self.linear else math.log(step + 1, self.rising)
        if self.total is None:
            return 1.0
        return max(0.0, (self.total - step) / max(1, self.total - self.rising))


class WarmupDecayLR(WarmupLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | None = None,
        warmup_max_lr: float | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)


class WarmupCosineLR(WarmupLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        self.falling, self.least = total_num_steps, cos_min_ratio
        super().__init__(optimizer, warmup_min_ratio, 1.0, warmup_num_steps, warmup_type)

    def get_lr(self) -> list[Any]:
        step = self.last_epoch - 1
        ratio = 0.0 if step < 0 else self.low + (1 - self.low) * self._share(step)
        if step >= self.rising:
            gone = (step - self.rising + 1) / max(1, self.falling - self.rising)
            ratio = (1 + math.cos(math.pi * min(1.0, gone))) / 2
            ratio = max(0.0, self.least + (1 - self.least) * ratio)
        return [lr * ratio for lr in self.base_lrs]


SCHEDULERS: dict[str, Any] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}
