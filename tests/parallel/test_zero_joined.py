"""ZeroRedundancyOptimizer in torch's Join: as the optimizer that every rank has whole; and what it
refuses of gradients and groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import ringdp
from ringdp import Communicator, UsageError
from ringdp.parallel import fronts
from tests.parallel.ddp_cases import Branches, backward, equal, gloo, says
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize("by_initial_size", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@on_ranks(2)
def test_ranks_without_inputs_step_their_slices_as_the_others_do(
    comm: Communicator, kind: Any, by_initial_size: bool
) -> None:
    """Beside DDP, and a step of all ranks after each join. AdamW only once: of the whole one, a
    rank that ends early does not keep the state. One parameter is never used."""
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
    assert all(map(equal, found[:half], found[half:]))


def early(comm: Communicator) -> str:
    gloo()
    net = ringdp.DistributedDataParallel(nn.Linear(12, 3))
    optimizer = fronts.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)

    def train() -> None:
        with Join([net, optimizer], throw_on_early_termination=True):
            for step in range(1 + comm.rank):
                backward(net, step, comm.rank)
                optimizer.step()

    return says(train, RuntimeError)


def test_an_early_end_is_told(ranks):
    ended, other = ranks(2)(early)
    assert "Rank 0 exhausted all inputs" in ended
    assert "at least one rank that exhausted inputs" in other


def refused(comm: Communicator) -> list[str]:
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = fronts.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, comm, lr=0.1)
    model(torch.tensor([1])).sum().backward()
    before = model.weight.detach().clone()
    said = [says(optimizer.step, UsageError), says(lambda: Join([optimizer]), UsageError)]
    assert torch.equal(model.weight, before)
    return said


def test_sparse_gradients_and_groups_that_join_cannot_count_are_told(ranks):
    for sparse, group in ranks(2)(refused):
        assert "parameter of shape [4, 3] is torch.sparse_coo; allowed: dense" in sparse
        assert "torch.distributed group: give the optimizer" in group
