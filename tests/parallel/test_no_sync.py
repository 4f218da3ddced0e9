"""Gradients accumulated in no_sync: what zero_grad clears of them, and what is refused inside it.
The reference is one process, which accumulates as torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Offload, UsageError
from tests.parallel.small import assert_gradients
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

WIDTH = 5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()  # the same on all ranks, so the average equals it


# Backwards inside no_sync ("kept") or outside ("reduced"), with what the user clears in between.
Step = tuple[str, Any]
LOOPS: dict[str, list[Step]] = {
    "kept": [("kept", 0), ("kept", 1), ("reduced", 2)],
    "cleared": [("kept", 0), ("none", None), ("reduced", 1)],
    "cleared in place": [("kept", 0), ("zero", None), ("kept", 1), ("reduced", 2)],
    "cleared between the kept": [("kept", 0), ("none", None), ("kept", 1), ("reduced", 2)],
    "reduced before": [("reduced", 0), ("kept", 1), ("reduced", 2)],
    "reduced before, cleared": [("reduced", 0), ("kept", 1), ("none", None), ("reduced", 2)],
    "reduced before, in place": [("reduced", 0), ("kept", 1), ("zero", None), ("reduced", 2)],
    "one parameter cleared": [("kept", 0), ("one", "2.weight"), ("kept", 1), ("reduced", 2)],
    "one cleared in place": [("kept", 0), ("zero one", "2.weight"), ("kept", 1), ("reduced", 2)],
    "the last of a unit": [("kept", 0), ("one", "0.weight"), ("one", "0.bias"), ("reduced", 1)],
}


def run(model: nn.Module, engine: ringdp.Engine | None, loop: list[Step]) -> None:
    for what, value in loop:
        if what == "kept" and engine is not None:
            with engine.no_sync():
                backward(model, value)
        elif what in ("kept", "reduced"):
            backward(model, value)
        elif what == "one":
            model.get_parameter(value).grad = None
        elif what == "zero one":
            model.get_parameter(value).grad.zero_()  # type: ignore[union-attr]
        else:
            model.zero_grad(set_to_none=what == "none")


@pytest.mark.parametrize(
    ("stage", "offloads"), [(0, False), (1, False), (2, True), (3, False), (3, True)]
)
@on_ranks(3)
def test_zero_grad_clears_what_no_sync_keeps(
    comm: Communicator, stage: int, offloads: bool
) -> None:
    for name, loop in LOOPS.items():
        model, twin = net(), net()
        offload = Offload(parameters=stage == 3, optimizer=True) if offloads else None
        engine = ringdp.shard(model, stage=stage, offload=offload, comm=comm)
        run(model, engine, loop)
        run(twin, None, loop)
        engine.check_reduced("gradients are read")
        assert_gradients(engine, twin, name)
        m = engine.memory(torch.optim.SGD(model.parameters()))
        assert m.gradients == engine.memory_formula().gradients
        engine.close()


@pytest.mark.parametrize(
    ("stage", "offloads"), [(0, False), (1, False), (2, False), (3, False), (3, True)]
)
@on_ranks(2)
def test_a_step_after_zeros_decays_weights_as_torch_does(
    comm: Communicator, stage: int, offloads: bool
) -> None:
    """And moves parameters by their momentum. Those whose gradient is None stay."""
    model, twin = net(), net()
    offload = Offload(parameters=True, optimizer=True) if offloads else None
    engine = ringdp.shard(model, stage=stage, offload=offload, comm=comm)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    stepped = [torch.optim.SGD(m.parameters(), **options) for m in (model, twin)]
    formula = engine.memory_formula().gradients
    for loop in (
        [("kept", 0), ("zero", None)],
        [("kept", 1), ("zero", None), ("one", "2.weight")],
        [("none", None), ("kept", 1), ("zero", None), ("one", "2.weight")],
        [("reduced", 2)],
        [("none", None), ("kept", 3), ("zero", None), ("kept", 4), ("zero", None)],
    ):
        run(model, engine, loop)
        run(twin, None, loop)
        for optimizer in stepped:
            optimizer.step()
        assert [p.grad is None for p in model.parameters()] == [
            p.grad is None for p in twin.parameters()
        ]
        assert engine.memory(stepped[0]).gradients == formula
        with engine.full_parameters():
            torch.testing.assert_close(
                dict(model.named_parameters()), dict(twin.named_parameters())
            )
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_what_needs_reduced_gradients_is_refused_in_no_sync(comm: Communicator, stage: int) -> None:
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def keep() -> None:
        with engine.no_sync():
            backward(model, 0)

    def changed(change: Any) -> None:
        keep()
        for p in model.parameters():
            change(p)
        backward(model, 1)

    def assign(p: Tensor) -> None:
        p.grad = p.grad + 1 if p.numel() else None

    for attempt, word in (
        (lambda: ringdp.clip_grad_norm_(engine, 1.0), "gradients are clipped or scaled, but"),
        (lambda: ringdp.LossScaler(engine).step(optimizer), "must be outside of it"),
        (optimizer.step, "the optimizer steps, but"),
        (lambda: changed(lambda p: p.grad.add_(1)), "was changed while gradients of no_sync wait"),
        (lambda: changed(assign), "was changed while gradients of no_sync wait"),
    ):
        keep()
        with pytest.raises(UsageError, match=word):
            attempt()
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()  # not one of the engine's optimizers
    model(torch.ones(1, WIDTH))  # ends the backward that raised
    optimizer.zero_grad()
    optimizer.step()  # no accumulated gradients are left
    backward(model, 1)
    optimizer.step()
    engine.close()
