"""Optimizers that count in their parameter groups work in ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringdp
from ringdp import Communicator
from ringdp.parallel import fronts
from tests.equal import equal
from tests.parallel.small import loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class CountingOptimizer(torch.optim.Optimizer):
    """Steps by lr divided by the number of the step, which it keeps in the group, as schedule-free
    optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / group["k"] * p.grad


@on_ranks(2)
def test_counts_in_parameter_groups_are_kept(comm: Communicator) -> None:
    weights: list[list[Tensor]] = []
    for sharded in (False, True):
        model = ringdp.DistributedDataParallel(net(), process_group=comm)
        ours = (CountingOptimizer, comm) if sharded else ()
        make = fronts.ZeroRedundancyOptimizer if sharded else CountingOptimizer
        optimizer = make(model.parameters(), *ours, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
            schedule.step()
        assert optimizer.param_groups[0]["k"] == 3
        assert optimizer.param_groups[0]["lr"] == 0.1 / 8
        weights.append([p.detach() for p in model.parameters()])
    assert equal(*weights)
