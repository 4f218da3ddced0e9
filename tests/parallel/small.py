"""A small model with batches and a loss that are the same on all ranks, so averaging changes
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringdp import Engine, Precision

WIDTH = 6
# computes in another dtype than parameters are stored in, without rounding
COMPUTE_IN_FLOAT64 = Precision(torch.float64)
with_and_without_precision = pytest.mark.parametrize(
    "precision", [None, COMPUTE_IN_FLOAT64], ids=["plain", "apart"]
)
# A parameter -> a reference to its gradient, in each form that users keep.
REFERENCES: tuple[Callable[[Any], Any], ...] = (
    lambda p: p.grad,
    lambda p: p.grad.view(-1)[1:],
    lambda p: p.grad.numpy(),
    lambda p: p.grad.detach(),
)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, seed: int = 0) -> Tensor:
    out: Tensor = model(batch(seed)).square().mean()
    return out


def step(model: nn.Module, optimizer: Any, *seeds: int) -> None:
    """One optimizer step for each seed."""
    for seed in seeds:
        optimizer.zero_grad()
        loss(model, seed).backward()
        optimizer.step()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """An optimizer's, of which one has an option of its own."""
    weights, biases = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
    return [{"params": biases, "lr": 0.01}, {"params": weights}]


def muon_and_adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    others, matrices = (group["params"] for group in groups(model))
    return torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)


def within_step(optimizer: Any, act: Callable[[], object]) -> None:
    """A step that begins with `act`, after all hooks."""

    def step(self: Any) -> None:
        act()
        type(self).step.__wrapped__(self)

    torch.optim.Optimizer.profile_hook_step(step)(optimizer)


def whole_parameters(engine: Engine) -> list[Tensor]:
    with engine.full_parameters():
        return [p.detach().clone() for p in engine.model.parameters()]


def assert_gradients(engine: Engine, twin: nn.Module, after: str = "") -> None:
    """Asserts that `engine`'s reduced gradients are the twin's; only this rank's parts where it has
    a sharded optimizer."""
    for unit in engine.units:
        for entry, mine in zip(unit.plan.entries, unit.gradients.views(), strict=True):
            p = twin.get_parameter(entry.name)
            exact = torch.zeros_like(p) if p.grad is None else p.grad
            if engine.stage.slices:
                exact = exact.flatten()[slice(*unit.plan.part(entry, engine.comm.rank))]
            torch.testing.assert_close(mine, exact, msg=f"{after} {entry.name}")


def assert_equal(engine: Engine, twin: nn.Module) -> None:
    for mine, exact in zip(whole_parameters(engine), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, exact.detach())


def assert_trains(engine: Engine, twin: nn.Module) -> None:
    """Asserts that a step of the engine's model is the twin's."""
    for model in (engine.model, twin):
        loss(model).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_equal(engine, twin)
