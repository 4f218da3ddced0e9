"""Parameters that are frozen and unfrozen around training calls: what is reduced, kept and
trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ringdp
from ringdp import Communicator, Precision
from ringdp.parallel.guards.resting import ShardedParam
from tests.parallel.small import (
    assert_equal,
    batch,
    loss,
    net,
    with_and_without_precision,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


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
