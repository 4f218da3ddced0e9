"""torch.compile of a sharded model or of its units, before or after shard(): it trains the same.

The backend runs the traced graphs, ahead-of-time gradients included, without generating code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Precision
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

WIDTH = 6
BACKEND = "aot_eager"
kinds = pytest.mark.parametrize(
    ("stage", "precision"), [(1, None), (3, None), (3, Precision(torch.float64))]
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def train(
    model: nn.Module, call: Callable[..., Any], optimizer: Any = None, take_step: Any = None
) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take_step = take_step or optimizer.step
    for step in range(3):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        call(batch).square().mean().backward()
        take_step()
        optimizer.zero_grad()


@kinds
@on_ranks(2)
def test_compiled_models_train_as_in_one_process(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    twin = net()
    train(twin, twin)
    for whole in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = net()
        engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
        call: Callable[..., Any] = model
        if whole:
            call = torch.compile(model, backend=BACKEND)
        else:
            for block in model:
                block.compile(backend=BACKEND)
        train(model, call)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        with engine.full_parameters():
            torch.testing.assert_close(
                dict(model.named_parameters()), dict(twin.named_parameters())
            )
        engine.close()


@kinds
@on_ranks(2)
def test_a_compiled_step_steps_slices(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """The engine's hooks around an optimizer's step run between the graphs."""
    torch._dynamo.reset()
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch._dynamo.utils.counters.clear()
    train(model, model, optimizer, torch.compile(optimizer.step, backend=BACKEND))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    train(twin, twin)
    with engine.full_parameters():
        torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()))
    engine.close()


@kinds
@on_ranks(1)
def test_what_is_compiled_sees_no_gradients(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """They are slices, or of another dtype: graphs of such parameters cannot be made."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(Block())
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    x = torch.ones(4, WIDTH)
    model(x).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    model[0].compile(backend=BACKEND)
    model(x).sum().backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] > 0
    assert not any("gradient" in why for why in counters["graph_break"])
    for p, once in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, 2 * once)
    engine.close()
