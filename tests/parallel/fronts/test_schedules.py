"""The learning rates of a DeepSpeed config's schedulers, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest

import ringdp
from ringdp.parallel import fronts
from tests.parallel.fronts.test_initialize import LR, NAMED, train
from tests.parallel.small import net

pytestmark = pytest.mark.process


def rates(name: str, steps: int, **params: Any) -> list[float]:
    config = NAMED | {"scheduler": {"type": name, "params": params}}
    engine, optimizer, _, scheduler = fronts.initialize(
        model=net(), config=config, comm=ringdp.init()
    )
    assert scheduler is engine.lr_scheduler
    assert scheduler.optimizer is optimizer
    found = []
    for step in range(steps):
        found += engine.get_lr()  # the learning rate of the next step
        train(engine, step)
    engine.engine.close()
    return found


def test_schedulers_of_a_config_are_deepspeeds_or_torchs():
    warm: dict[str, Any] = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}
    logs = [0.1 + 0.4 * math.log(n) / math.log(4) for n in (1, 1, 2, 3, 4)]
    assert rates("WarmupLR", 6, **warm) == pytest.approx([*logs, 0.5])
    line = [0.1, 0.1, 0.2, 0.3, 0.4]
    assert rates("WarmupLR", 7, **warm, warmup_type="linear") == pytest.approx([*line, 0.5, 0.5])
    falls = rates("WarmupDecayLR", 9, **warm, warmup_type="linear", total_num_steps=6)
    assert falls == pytest.approx([*line, 0.5, 0.3, 0.1, 0.1])
    # up to the optimizer's own rate
    assert rates("WarmupLR", 4, warmup_num_steps=1) == pytest.approx([0, 0, LR, LR])
    cosine = rates(
        "WarmupCosineLR", 10, total_num_steps=8, warmup_num_steps=4, warmup_type="linear",
        warmup_min_ratio=0.2, cos_min_ratio=0.1,
    )  # fmt: skip
    down = [0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4, 4)]
    assert cosine == pytest.approx([LR * r for r in (0, 0.2, 0.4, 0.6, 0.8, *down)])
    assert rates("StepLR", 3, step_size=2, gamma=0.5) == pytest.approx([LR, LR, LR / 2])
