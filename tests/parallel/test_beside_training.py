"""What users do to a model between training calls: assign `p.data`, clear gradients late, step
another model on one rank. The reference is the same loop in one process; test_freezing.py has more
of freezing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, LossScaler, Offload, Precision
from ringdp.parallel.optimizer.clip import unscale_gradients
from tests.parallel.small import (
    WIDTH,
    assert_equal,
    assert_gradients,
    batch,
    loss,
    net,
    with_and_without_precision,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

STEPS = 3

Loop = Callable[[nn.Module, Any], None]


def clears_late(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        value = loss(model, step)
        model.zero_grad(set_to_none=step != 1)
        value.backward()
        optimizer.step()


def assigns_data(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        loss(model, step).backward()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:  # the gradient of an empty slice is None
                    p.data = p.data - 0.1 * p.grad
        optimizer.zero_grad()


def swaps_in_averages(model: nn.Module, optimizer: Any) -> None:
    """The values of `p.data` are put aside, and restored later."""
    averages = {n: p.data.clone() for n, p in model.named_parameters()}
    for step in range(STEPS):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        backup = {}
        for n, p in model.named_parameters():
            averages[n] = (averages[n] + p.data) / 2
            backup[n], p.data = p.data, averages[n]
        with torch.no_grad():
            loss(model, step)
        for n, p in model.named_parameters():
            p.data = backup[n]


def calls_blocks(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        x = batch(step)
        for block in model.children():
            x = block(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def freezes_in_one_step(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        if step == 1:
            loss(model)  # no backward follows
        model.get_submodule("1").requires_grad_(step != 1)
        model.get_parameter("0.0.bias").requires_grad = step != 1
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def freezes_with_gradients(model: nn.Module, optimizer: Any) -> None:
    """What is frozen keeps its gradient and momentum."""
    first = model.get_submodule("0")
    for step in range(4):
        loss(model, step).backward()
        first.requires_grad_(False)
        loss(model, step + 7).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        first.requires_grad_(step != 1)


def freezes_after_forward(model: nn.Module, optimizer: Any) -> None:
    block = model.get_submodule("1")
    for step in range(4):
        block.requires_grad_(True)
        value = loss(model, step)
        block.requires_grad_(step != 1)
        block.get_parameter("0.bias").requires_grad_(step != 2)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()


def freezes_during_backward(model: nn.Module, optimizer: Any) -> None:
    layer = model.get_submodule("1.0")

    def freeze(*_: object) -> None:
        layer.get_parameter("weight").requires_grad_(False)

    for step in range(STEPS):
        layer.requires_grad_(True)
        handle = layer.register_forward_hook(
            lambda *given: given[-1].register_hook(freeze) and None
        )
        loss(model, step).backward()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: list[Loop] = [
    clears_late,
    assigns_data,
    swaps_in_averages,
    calls_blocks,
    freezes_in_one_step,
    freezes_with_gradients,
    freezes_after_forward,
    freezes_during_backward,
]


@with_and_without_precision
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_loops_train_as_in_one_process(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    for loop in LOOPS:
        model, twin = net(), net()
        engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
        for one in (model, twin):
            loop(one, torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9))
        assert_equal(engine, twin)
        assert len(engine.gathering._seen) <= 2 * len(engine.units)
        engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_the_default_device_need_not_be_the_models(
    comm: Communicator, tmp_path: Path, stage: int
) -> None:
    """As after `torch.set_default_device("cuda")`, or where a model is made and sharded within
    `torch.device("meta")`."""
    model, twin, x = net(), net(), batch()
    with torch.device("meta"):
        comm.split(0, comm.rank).close()
        engine = ringdp.shard(model, stage=stage, comm=comm)
        optimizer, scaler = ringdp.AdamW(model.parameters()), LossScaler(engine)
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_()
        norm = ringdp.clip_grad_norm_(engine, 0.1)
        scaler.step(optimizer)
        ringdp.save(tmp_path / "saved", engine, optimizer)
        ringdp.load(tmp_path / "saved", engine, optimizer)
        engine.comm.barrier()
    twins_optimizer = ringdp.AdamW(twin.parameters())
    twin(x).square().mean().backward()
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(twin.parameters(), 0.1)))
    twins_optimizer.step()
    assert_equal(engine, twin)
    engine.close()


@on_ranks(2)
def test_the_default_device_need_not_be_that_of_ddps_model(comm: Communicator) -> None:
    model, twin, x = net(), net(), batch()
    with torch.device("meta"):
        wrapper = ringdp.DistributedDataParallel(model, find_unused_parameters=True)
        for _ in range(2):
            wrapper(x).square().mean().backward()
    for _ in range(2):
        twin(x).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_stepping_an_unrelated_parameter_on_one_rank_is_harmless(
    comm: Communicator, stage: int
) -> None:
    """Rank 0 steps a model of its own between a forward and its backward."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    mine = nn.Parameter(torch.ones(1))
    mine.grad = torch.ones(1)
    for step in range(2):
        value = loss(model, step)
        if comm.rank == 0:
            torch.optim.SGD([mine], lr=0.1).step()
        value.backward()
    for step in range(2):
        loss(twin, step).backward()
    assert_gradients(engine, twin)
    engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_the_norm_ignores_padding(comm: Communicator, stage: int) -> None:
    """Padding behind gradients in a buffer, which may be NaN, does not count: neither when the
    first backward adds to zeros nor when it writes."""
    torch.use_deterministic_algorithms(True)
    try:
        offload = Offload(optimizer=True) if stage else None
        engine = ringdp.shard(model := net(), stage=stage, offload=offload, comm=comm)
    finally:
        torch.use_deterministic_algorithms(False)
    norms = []
    for gradient in (torch.zeros_like, lambda _: None):
        for p in model.parameters():
            p.grad = gradient(p)
        loss(model).backward()
        assert unscale_gradients(engine, 1.0)
        norms.append(ringdp.clip_grad_norm_(engine, math.inf))
    engine.close()
    added, made = norms
    assert added == made, norms


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_evaluation_amid_another_models_backward_makes_no_gradients(
    comm: Communicator, stage: int
) -> None:
    """With zeros for gradients, an optimizer's weight decay would move the parameters."""
    engine = ringdp.shard(model := net(), stage=stage, comm=comm)
    seen = list[Tensor]()

    def evaluate(_: Tensor) -> None:
        with torch.no_grad():
            seen.append(loss(model))

    y = batch() * torch.ones(WIDTH, requires_grad=True)
    y.register_hook(evaluate)
    y.sum().backward()
    assert seen == [loss(net())]
    assert all(p.grad is None for p in model.parameters())
    assert engine.ledger.now["gathered"] == 0
    engine.close()


class WaitsInside(nn.Sequential):
    """Its call returns when another thread has called it, too."""

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            return super().forward(x)
        with ThreadPoolExecutor(1) as other:
            seen = other.submit(loss, self).exception()
        self.raised = str(seen) if seen else ""
        return super().forward(x)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_call_during_another_threads_is_refused(comm: Communicator, stage: int) -> None:
    """It would free what that one computes with. In stage 0 it changes nothing."""
    model, twin = WaitsInside(*net()), net()
    engine = ringdp.shard(model, stage=stage, unit=nn.Linear, comm=comm)
    for one in (model, twin):
        loss(one).backward()
    assert ("two threads" in model.raised) == (stage > 0), model.raised
    assert_gradients(engine, twin)
    engine.close()
