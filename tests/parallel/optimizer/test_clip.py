"""The norm of all gradients, and clipping by it."""

from __future__ import annotations

import math

import pytest
import torch

import ringdp
from ringdp import Communicator
from tests.parallel.small import COMPUTE_IN_FLOAT64, assert_equal, batch, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def norms(comm: Communicator, stage: int) -> tuple[float, float]:
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    model(batch(comm.rank)).square().mean().backward()
    norm = ringdp.clip_grad_norm_(engine, 0.01)
    after = ringdp.clip_grad_norm_(engine, 1e9)
    engine.close()
    return norm, after


def test_the_norm_is_over_all_ranks_gradients(ranks):
    twin = net()
    for rank in range(3):
        (twin(batch(rank)).square().mean() / 3).backward()
    exact = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e9).item()
    found = {pair for stage in range(4) for pair in ranks(3)(norms, stage)}
    ((norm, after),) = found  # the same bits in all stages on all ranks
    assert norm == pytest.approx(exact, rel=1e-5)
    assert after == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_gradients_assigned_by_the_user_are_clipped(comm: Communicator, stage: int) -> None:
    engine = ringdp.shard(model := net(), stage=stage, comm=comm)
    model(batch(comm.rank)).square().mean().backward()
    first, *others = model.parameters()
    first.grad = None
    for p in others:
        p.grad = torch.full_like(p.grad, 2.0)
    elements = sum(p.numel() for p in list(net().parameters())[1:])
    assert ringdp.clip_grad_norm_(engine, 1.0) == pytest.approx(2 * math.sqrt(elements))
    assert all(p.grad.allclose(torch.tensor(elements**-0.5)) for p in others)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_gradients_assigned_after_a_forward_are_stepped(comm: Communicator, stage: int) -> None:
    """A forward without a backward leaves gathered parameters in place."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, precision=COMPUTE_IN_FLOAT64, comm=comm)
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        loss(m).backward()
        loss(m)
        for p in m.parameters():
            p.grad = p.grad * 0.5
        optimizer.step()
    assert_equal(engine, twin)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_clipping_by_a_nan_norm_is_as_torchs(comm: Communicator, stage: int) -> None:
    """Every gradient becomes NaN, as with torch, until it is cleared."""
    engine = ringdp.shard(model := net(), stage=stage, comm=comm)
    model(batch(comm.rank)).square().mean().backward()
    next(model.parameters()).grad.fill_(float("nan"))
    assert math.isnan(ringdp.clip_grad_norm_(engine, 1.0))
    assert all(p.grad.isnan().all() for p in model.parameters())
    model.zero_grad(set_to_none=False)
    assert ringdp.clip_grad_norm_(engine, 1.0) == 0
    engine.close()
