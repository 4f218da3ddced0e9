"""ZeroRedundancyOptimizer in torch's Join equals the unsharded optimizer; and gradients and groups
that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import ringdp
from ringdp import Communicator, UsageError
from ringdp.parallel import fronts
from tests.equal import equal
from tests.parallel.ddp.cases import Branches, backward, error_text, gloo
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize("by_initial_size", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@on_ranks(2)
def test_ranks_without_inputs_step_their_slices(
    comm: Communicator, kind: Any, by_initial_size: bool
) -> None:
    """With DDP, and one step of all ranks after each join. AdamW joins only once, since an
    unsharded one does not keep the state of a rank that ends early. One parameter is never used."""
    gloo()
    numbers = [1 + 2 * comm.rank, 1 + 2 * (comm.size - 1 - comm.rank)]
    found: list[list[Tensor]] = []
    for sharded in (False, True):
        torch.manual_seed(comm.rank)
        model = Branches(comm.rank, differ=False)
        net = ringdp.DistributedDataParallel(model, find_unused_parameters=True)
        make: Any = fronts.ZeroRedundancyOptimizer if sharded else kind
        optimizer = make(net.parameters(), *[kind] * sharded, lr=0.1)
        for inputs in numbers[: 1 if kind is torch.optim.AdamW else 2]:
            with Join(
                [net, optimizer][: 1 + sharded], divide_by_initial_world_size=by_initial_size
            ):
                for step in range(inputs):
                    backward(net, step, comm.rank)
                    optimizer.step()
            found.append([p.detach().clone() for p in net.parameters()])
        if kind is torch.optim.SGD:
            backward(net, 9, comm.rank)
            optimizer.step()
            found.append([p.detach().clone() for p in net.parameters()])
    half = len(found) // 2
    assert all(equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))


@on_ranks(2)
def test_a_rank_without_inputs_drops_its_own_gradients(comm: Communicator) -> None:
    """Rank 0, whose slice is the first parameter, has a gradient of it from its last step; rank 1
    then steps only the second."""
    gloo()
    first, second = params = [nn.Parameter(torch.zeros(16)) for _ in range(2)]
    optimizer = fronts.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0)
    with Join([optimizer]):
        for step in range(1 + comm.rank):
            for p in params:
                p.grad = torch.ones(16) if step == 0 or p is second else None
            optimizer.step()
    assert torch.equal(first, torch.full((16,), -1.0))
    assert torch.equal(second, torch.full((16,), -2.0))


@on_ranks(2)
def test_join_can_raise_on_early_termination(comm: Communicator) -> None:
    gloo()
    net = ringdp.DistributedDataParallel(nn.Linear(12, 3))
    optimizer = fronts.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)

    def train() -> None:
        with Join([net, optimizer], throw_on_early_termination=True):
            for step in range(1 + comm.rank):
                backward(net, step, comm.rank)
                optimizer.step()

    others = "at least one rank that exhausted inputs"
    why = others if comm.rank else "Rank 0 exhausted all inputs"
    assert why in error_text(train, RuntimeError)


@on_ranks(2)
def test_sparse_gradients_and_communicators_in_join_are_refused(comm: Communicator) -> None:
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = fronts.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, comm, lr=0.1)
    model(torch.tensor([1])).sum().backward()
    before = model.weight.detach().clone()
    sparse = error_text(optimizer.step, UsageError)
    assert "parameter of shape [4, 3] is torch.sparse_coo; allowed: dense" in sparse
    group = error_text(lambda: Join([optimizer]), UsageError)
    assert "torch.distributed group: give the optimizer" in group
    assert torch.equal(model.weight, before)
