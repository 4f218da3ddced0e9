"""`join` beyond torch's single forward and backward in turn: several forwards, models and skipped
buckets."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ringdp import Communicator, DistributedDataParallel
from tests.equal import equal
from tests.parallel.ddp.cases import WIDTH, Branches, gloo, gradients, loss, mlp, rows
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

LAST = 2  # steps that the last rank takes alone


def steps(comm: Communicator) -> range:
    return range(1 + LAST * comm.rank)


def forwards(net: nn.Module, step: int, rank: int) -> list[Tensor]:
    """Two forwards before one backward, and one without a backward."""
    net.zero_grad()
    net(rows(step, rank, 2))
    sum(loss(net(rows(step, rank, part))) for part in range(2)).backward()
    return gradients(net)


@on_ranks(2)
def test_join_shadows_several_forwards_before_one_backward(comm: Communicator) -> None:
    torch.manual_seed(0)
    alone = mlp()
    net = DistributedDataParallel(copy.deepcopy(alone), process_group=comm, bucket_cap_mb=0)
    halves = []
    with net.join():
        for step in steps(comm):
            averages = forwards(net, step, comm.rank)
            if step:
                halves.append(equal(averages, [g / 2 for g in forwards(alone, step, comm.rank)]))
    assert halves == [True] * LAST * comm.rank


@pytest.mark.parametrize("unused", [False, True])
@on_ranks(2)
def test_several_models_can_join_together(comm: Communicator, unused: bool) -> list[list[float]]:
    """The second model's forward comes before the first one's backward."""
    gloo()
    torch.manual_seed(0)
    first = (
        DistributedDataParallel(
            nn.Sequential(Branches(0, differ=False)), find_unused_parameters=unused
        )
        if unused
        else DistributedDataParallel(mlp())
    )
    second = DistributedDataParallel(nn.Linear(3, WIDTH))
    both = nn.ModuleList([first, second])
    with Join([first, second]):
        for step in steps(comm):
            both.zero_grad()
            loss(second(first(rows(step, comm.rank)))).backward()
            with torch.no_grad():
                for p in both.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
    return [p.flatten().tolist() for p in both.parameters()]


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@on_ranks(2)
def test_unused_buckets_are_reduced_while_ranks_may_have_ended(
    comm: Communicator, options: dict[str, bool]
) -> list[list[float]]:
    """Buckets of unused parameters are skipped, except while ranks may have ended."""
    net = DistributedDataParallel(
        Branches(0, differ=False),
        process_group=comm,
        bucket_cap_mb=0,
        skip_all_reduce_unused_params=True,
        **options,
    )
    started = []
    for _ in range(2):
        with net.join():
            for step in steps(comm):
                net.zero_grad()
                loss(net(rows(step, comm.rank))).backward()
        loss(net(rows(9, comm.rank))).backward()
        started.append(net.reducer.started)
    buckets = len(net.reducer.buckets)
    assert all(0 < n < buckets for n in started)
    return [p.flatten().tolist() for p in net.parameters()]


@on_ranks(2)
def test_a_copy_can_join(comm: Communicator) -> list[float]:
    """Rank 0 has no inputs at all, but the copy must still make its reducer."""
    net = copy.deepcopy(DistributedDataParallel(nn.Linear(WIDTH, 3)))
    with net.join():
        for step in range(2 * comm.rank):
            net.zero_grad()
            loss(net(rows(step, comm.rank))).backward()
    return [v for p in net.parameters() for v in p.flatten().tolist()]
