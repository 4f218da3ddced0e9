"""What users do to a model between training calls: assign `p.data`, clear gradients late, freeze
parameters, step another model on one rank. The reference is the same loop in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringdp
from ringdp import Communicator, LossScaler, Offload, Precision
from ringdp.parallel.guards.resting import ShardedParam
from ringdp.parallel.optimizer.clip import unscale_gradients
from tests.parallel.small import (
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


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_frozen_blocks_are_not_reduced(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """So many of the three blocks are frozen in the forward, and in the backward."""
    engine = ringdp.shard(model := net(), stage=stage, precision=precision, comm=comm)
    sent = []
    for frozen in ((0, 0), (1, 1), (0, 1), (3, 3), (3, 2)):
        before = engine.reducing.comm.sent_bytes()
        model.requires_grad_(True)
        model[: frozen[0]].requires_grad_(False)
        value = model(batch().requires_grad_()).square().mean()
        model.requires_grad_(True)
        model[: frozen[1]].requires_grad_(False)
        value.backward()
        sent.append(engine.reducing.comm.sent_bytes() - before)
    engine.close()
    each = sent[0] // 3
    assert sent == [3 * each, 2 * each, 2 * each, 0, each]


@with_and_without_precision
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_accumulated_gradients_survive_freezing(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    for one in (model, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            with engine.no_sync():
                loss(one, step).backward()
                one[0].requires_grad_(False)
                loss(one, step + 7).backward()
            loss(one, step + 9).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
            one[0].requires_grad_(True)
    assert_equal(engine, twin)
    engine.close()


@with_and_without_precision
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_parameters_can_be_unfrozen_after_sharding(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """Parameters that were frozen when the model was sharded are unfrozen one after another, and
    first used without gradients."""
    model, twin = net(), net()
    model[0].requires_grad_(False), twin[0].requires_grad_(False)
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    for one in (model, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step, thawed in enumerate((None, one[0][0].bias, one[0][0].weight, None)):
            if thawed is not None:
                thawed.requires_grad_(True)
            with torch.inference_mode():
                loss(one, step)
            for seed in (step, step + 7):
                loss(one, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(engine, twin)
    assert engine.memory(optimizer).gradients == engine.memory_formula().gradients
    engine.close()


@with_and_without_precision
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_an_unfrozen_parameter_trains_before_its_module_is_called(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """Its unit was frozen when the model was sharded. A backward that misses it makes zeros;
    in stage 0 without precision it may be used where its module is not called."""
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[0].requires_grad_(False)
    direct = stage == 0 and precision is None

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model[1](nn.functional.linear(x, model[0].weight) if direct else x)

    model.forward = forward
    engine = ringdp.shard(model, stage=stage, unit=nn.Linear, precision=precision, comm=comm)
    model[0].requires_grad_(True)
    model(torch.full((2, 3), 1.0 + comm.rank)).sum().backward()
    weight, bias = (p.grad for p in model[0].parameters())
    assert not bias.any()
    assert bool(weight.any()) == direct
    if direct:
        first = weight.clone()
        comm.broadcast(first)
        assert torch.equal(weight, first)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_the_engine_reads_frozen_parameters_without_their_guards(
    comm: Communicator, stage: int
) -> None:
    """Otherwise an iteration would take 5 us for each of them."""
    model = net()
    model.requires_grad_(False)[0][0].bias.requires_grad_(True)
    engine = ringdp.shard(model, stage=stage, comm=comm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedParam, "__torch_function__", None)
        loss(model).backward()
    engine.close()


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
