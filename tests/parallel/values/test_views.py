"""Units that return views of what they compute. The reference is one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator
from tests.equal import equal
from tests.parallel.values.test_returned import WIDTH, train
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).t()


class WritesToViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(ReturnsView() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = x + unit(torch.tanh(x)).mul_(2).t()
        return x


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_returned_view_may_be_written_to(comm: Communicator, stage: int) -> None:
    """Autograd drops the hooks of a view that is written to, not those of its base."""
    net, twin = WritesToViews(), WritesToViews()
    engine = ringdp.shard(net, stage=stage, overlap=False, comm=comm)
    assert equal(train(net), train(twin))
    engine.close()


class AddsLoss(torch.autograd.Function):
    """Returns its first input, which torch makes a view of it, and trains `loss`, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones(())


class Routed(nn.Module):
    """Computes its loss after its output, so that the loss's backward runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out, x = self.expert(x), torch.tanh(x)
        return AddsLoss.apply(out, self.router(x).square().mean())


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_function_that_returns_its_input_may_have_others(comm: Communicator, stage: int) -> None:
    net, twin = (nn.Sequential(*(Routed() for _ in range(3))) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    engine = ringdp.shard(net, stage=stage, unit=Routed, overlap=False, comm=comm)
    assert equal(train(net), train(twin))
    engine.close()
