"""The learning rates that a DeepSpeed config's `scheduler` names: DeepSpeed's warm-ups, or torch's.

    WarmupLR        rises from warmup_min_lr to warmup_max_lr in warmup_num_steps, and stays
    WarmupDecayLR   then falls in a line, to warmup_min_lr at total_num_steps

With warmup_type "log" the rise is as log(step), with "linear" as step. As in DeepSpeed the first
two steps of the optimizer are both at warmup_min_lr.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer, lr_scheduler


class WarmupLR(lr_scheduler.LRScheduler):
    """`warmup_max_lr`: by default the lr of the optimizer's first group. Raises ValueError."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        total_num_steps: int | None = None,
    ) -> None:
        if warmup_type not in ("log", "linear") or warmup_num_steps < 1:
            raise ValueError("allowed: warmup_type 'log' or 'linear', at least 1 warmup_num_steps")
        self.low, self.high = float(warmup_min_lr), warmup_max_lr
        self.rising, self.total = max(2, warmup_num_steps), total_num_steps
        self.linear = warmup_type == "linear"
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        high = self.base_lrs[0] if self.high is None else self.high
        lr = self.low + (high - self.low) * self._share(self.last_epoch - 1)
        return [lr] * len(self.base_lrs)

    def _share(self, step: int) -> float:
        """Of the way up."""
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
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, total_num_steps
        )


_OURS: dict[str, Any] = {"WarmupLR": WarmupLR, "WarmupDecayLR": WarmupDecayLR}


def named(name: str) -> type[lr_scheduler.LRScheduler] | None:
    """DeepSpeed's or torch's of that name, if there is one."""
    found = _OURS.get(name, getattr(lr_scheduler, name, None))
    is_one = isinstance(found, type) and issubclass(found, lr_scheduler.LRScheduler)
    return found if is_one else None
