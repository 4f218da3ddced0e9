"""Slices of parameters and gradients: what they share with whole ones, and what is refused."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import ringdp
from ringdp import Communicator, UsageError
from tests.parallel.small import (
    loss,
    net,
    within_step,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_closure_keeps_gradients_in_their_memory(comm: Communicator, stage: int) -> None:
    engine = ringdp.shard(model := nn.Linear(3, 3), stage=stage, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = engine.units[0].gradients.reduced.data_ptr()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(1, 3)).sum()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(closure)
        assert engine.units[0].gradients.reduced.data_ptr() == memory
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_gradients_are_otherwise_ordinary_slices(comm: Communicator, stage: int) -> None:
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    optimizer = torch.optim.Adam(model.parameters())
    loss(model).backward()
    p = model[0][0].weight
    assert p.grad is p.grad
    assert p.grad.shape == p.shape
    file = io.BytesIO()
    torch.save(p.grad, file)
    file.seek(0)
    for plain in (copy.deepcopy(p.grad), torch.load(file)):
        assert type(plain) is Tensor
        assert plain.tolist() == p.grad.tolist()
    all_gradients = [q.grad for q in model.parameters()]
    for mine, copied in zip(all_gradients, copy.deepcopy(all_gradients), strict=True):
        assert copied.tolist() == mine.tolist(), "not the values of a gradient copied before"
    with pytest.raises(UsageError, match=r"dim=1.*flat slice"):
        p.grad.norm(dim=1)
    with pytest.raises(UsageError, match="order 0 "):
        torch.linalg.vector_norm(p.grad, 0)
    with pytest.raises(UsageError, match="of a matrix it is another norm"):
        torch.linalg.norm(p.grad, math.inf)
    types = []
    ps = [q for q in model.parameters() if q.numel()]
    within_step(optimizer, lambda: types.extend(type(q.grad) for q in ps))
    assert set(types) == {Tensor}
    assert len(optimizer.state) == len(ps), "empty slices have no state"
    optimizer.zero_grad()
    with engine.no_sync():
        loss(model).backward()
    with pytest.raises(UsageError, match=r"the norm of gradients is taken.*no_sync"):
        clip_grad_norm_(model.parameters(), 1.0)
    loss(model).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UsageError, match=r"0\.0\.weight is used outside"):
        p.grad = torch.zeros(3, 5, 7)
    with pytest.raises(RuntimeError, match="dtype"):
        p.grad = p.grad.double()
    del p.grad
    assert p.grad is None
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_sliced_parameters_report_their_full_dimensions(comm: Communicator, stage: int) -> None:
    """Scripts choose by dimension which parameters to decay; flat slices would all look like
    biases."""
    model = net()
    whole = [p.dim() for p in model.parameters()]
    ringdp.shard(model, stage=stage, comm=comm)
    assert [p.dim() for p in model.parameters()] == whole
    assert [p.ndim for p in model.parameters()] == whole
    assert [p.ndimension() for p in model.parameters()] == whole
    weight = model[0][0].weight
    before = weight.detach().clone()
    for fill in (nn.init.orthogonal_, nn.init.eye_, nn.init.xavier_normal_, nn.init.sparse_):
        with pytest.raises((UsageError, ValueError)):
            fill(weight, 0.5) if fill is nn.init.sparse_ else fill(weight)
    torch.testing.assert_close(weight.detach(), before, rtol=0, atol=0)
