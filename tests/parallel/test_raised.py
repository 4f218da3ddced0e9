"""A backward that raised is ended by whatever the next one does first; a forward that raised frees
what it gathered. The reference is one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringdp
from ringdp import Communicator
from ringdp.parallel.state import State
from ringdp.parallel.unit import FlatUnit
from tests.parallel.loop_models import Fail
from tests.parallel.small import COMPUTE_IN_FLOAT64, WIDTH, assert_gradients, batch, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

on_purpose = pytest.raises(RuntimeError, match="on purpose")


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_backward_through_frozen_units(comm: Communicator, stage: int) -> None:
    """No parameter gets a gradient."""
    model, twin = net().requires_grad_(False), net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    x, y = batch().requires_grad_(), batch().requires_grad_()
    handle = model[1].register_forward_pre_hook(lambda _m, inputs: Fail.apply(inputs[0]))
    fails = model(x).square().mean()
    handle.remove()
    value = model(x).square().mean()
    with on_purpose:
        fails.backward()
    value.backward()
    twin(y).square().mean().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert engine.ledger.now["gathered"] == 0
    engine.close()


@on_ranks(2)
def test_a_backward_of_weights_alone(comm: Communicator) -> None:
    """It passes no output of a unit."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=0, comm=comm)
    handle = model[1].register_forward_pre_hook(lambda _m, inputs: Fail.apply(inputs[0]))
    with on_purpose:
        loss(model).backward()
    handle.remove()
    for one in (model, twin):
        torch.stack([p.square().sum() for p in one.parameters()]).sum().backward()
    assert_gradients(engine, twin)
    engine.close()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: self.block(x).sin(), x, use_reentrant=True)
        return y


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_recomputation(comm: Communicator, stage: int) -> None:
    """It comes before any gradient of a unit's output. Every unit is reduced once."""
    torch.manual_seed(0)
    model = nn.ModuleList([Recomputed(), Recomputed()])
    engine = ringdp.shard(model, stage=stage, unit=nn.Linear, comm=comm)
    x = batch().requires_grad_()
    fails = model[1](Fail.apply(model[0](x))).sum()
    value = model[1](model[0](x)).sum()
    with on_purpose:
        fails.backward()
    start, reduced = engine.reducing.start, list[int]()

    def count(unit: FlatUnit) -> None:
        reduced.append(unit.index)
        start(unit)

    engine.reducing.start = count  # type: ignore[method-assign]
    value.backward()
    assert reduced == [2, 1]
    engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_gradient_that_was_not_taken_is_dropped(comm: Communicator, stage: int) -> None:
    """The compute parameter has it, its master does not."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, precision=COMPUTE_IN_FLOAT64, comm=comm)

    def fail(_: Tensor) -> None:
        raise RuntimeError("on purpose")

    handle = engine.units[2].parameters[0].register_post_accumulate_grad_hook(fail)
    with on_purpose:
        loss(model).backward()
    handle.remove()
    for one in (model, twin):
        loss(one, 1).backward()
    assert_gradients(engine, twin)
    engine.close()


def fails(*_: object) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("grads", [False, True])
@on_ranks(2)
def test_a_unit_whose_forward_raised_is_freed(comm: Communicator, grads: bool) -> None:
    """Else the next iteration, a smaller batch, say, would need memory for one more unit."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    handle = model[1].register_forward_pre_hook(fails)
    with on_purpose, torch.set_grad_enabled(grads):
        loss(model)
    handle.remove()
    assert engine.units[2].state is State.SHARDED
    for one in (model, twin):
        loss(one).backward()
    assert_gradients(engine, twin)
    assert engine.ledger.peak["gathered"] == engine.memory_formula().gathered_peak
    engine.close()
