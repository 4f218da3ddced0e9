"""`join`: ranks with different numbers of inputs; also with several forwards or models, and skipped
buckets."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from ringdp import Communicator, DistributedDataParallel
from tests.equal import equal
from tests.parallel.ddp.cases import (
    WIDTH,
    Branches,
    Wrap,
    backward,
    error_text,
    gloo,
    gradients,
    loss,
    mlp,
    ours_and_torchs,
    rows,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize("options", [{}, {"divide_by_initial_world_size": False}])
@pytest.mark.parametrize("make", ["mlp", "batch norm"])
@on_ranks(2)
def test_uneven_inputs_give_torchs_bits(
    comm: Communicator, options: dict[str, bool], make: str
) -> None:
    """Rank r has 2 + 2r batches; every second one accumulates."""

    def found(wrap: Wrap) -> list[Tensor]:
        torch.manual_seed(comm.rank)
        net = wrap(mlp() if make == "mlp" else nn.Sequential(mlp(), nn.BatchNorm1d(3)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        seen = []
        with net.join(**options):
            for step in range(2 + 2 * comm.rank):
                optimizer.zero_grad()
                with net.no_sync():
                    loss(net(rows(step, comm.rank, 1))).backward()
                loss(net(rows(step, comm.rank))).backward()
                seen += gradients(net)
                optimizer.step()
        return [*seen, *net.state_dict().values()]

    assert equal(*ours_and_torchs(found))


@pytest.mark.parametrize("by_initial_size", [True, False])
@on_ranks(2)
def test_torchs_join_works_with_an_optimizer(comm: Communicator, by_initial_size: bool) -> None:
    """Joins together with an optimizer, twice, with an iteration of all ranks after each."""

    def found(wrap: Wrap) -> list[Tensor]:
        torch.manual_seed(comm.rank)
        net = wrap(nn.Sequential(mlp(), nn.BatchNorm1d(3)))
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        seen = []
        for inputs in (1 + 2 * comm.rank, 3 - comm.rank):
            with Join([net, optimizer], divide_by_initial_world_size=by_initial_size):
                for step in range(inputs):
                    seen += backward(net, step, comm.rank)
                    optimizer.step()
            seen += [t.clone() for t in net.state_dict().values()]
        return seen + backward(net, 9, comm.rank)

    assert equal(*ours_and_torchs(found))


@on_ranks(2)
def test_torchs_join_can_raise_on_early_termination(comm: Communicator) -> None:
    def train(wrap: Wrap) -> None:
        net = wrap(mlp())
        with Join([net], throw_on_early_termination=True):
            for step in range(1 + comm.rank):
                backward(net, step, comm.rank)

    ours, theirs = ours_and_torchs(lambda wrap: error_text(lambda: train(wrap), RuntimeError))
    assert ours == theirs


@on_ranks(3)
def test_uneven_inputs_with_unused_parameters(comm: Communicator) -> list[list[float]]:
    net = DistributedDataParallel(Branches(comm.rank), find_unused_parameters=True)
    with net.join():
        for step in range(1 + comm.rank):
            backward(net, step, comm.rank)
    with net.join(enable=False):
        backward(net, 9, comm.rank)
    return [p.flatten().tolist() for p in net.parameters()]


@on_ranks(2)
def test_early_termination_can_raise_on_every_rank(comm: Communicator) -> None:
    net = DistributedDataParallel(mlp(), process_group=comm)

    def train() -> None:
        with net.join(throw_on_early_termination=True):
            for step in range(1 + comm.rank):
                backward(net, step, comm.rank)

    others = "Detected at least one rank that exhausted inputs: [0]"
    assert (others if comm.rank else "Rank 0 exhausted all inputs") in error_text(train)


@on_ranks(2)
def test_equal_numbers_of_inputs_are_no_early_termination(comm: Communicator) -> None:
    def found(wrap: Wrap) -> list[Tensor]:
        net = wrap(mlp())
        with net.join(throw_on_early_termination=True):
            return [g for step in range(2) for g in backward(net, step, comm.rank)]

    assert equal(*ours_and_torchs(found))


class Tables(nn.Module):
    """Two tables with sparse gradients, the second of which may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ModuleList(nn.Embedding(4, 2, sparse=True) for _ in range(2))

    def forward(self, rows: Tensor, used: int) -> Tensor:
        return sum((table(rows).square().sum() for table in self.both[:used]), torch.zeros(()))


@pytest.mark.parametrize("joined", [False, True])
@on_ranks(2)
def test_sparse_gradients_missing_on_a_rank_count_as_zero(comm: Communicator, joined: bool) -> None:
    """Each rank has its own rows and number of tables used; with `join`, ranks have 2 and 3
    steps."""
    net = DistributedDataParallel(Tables(), process_group=comm, find_unused_parameters=not joined)
    twin = copy.deepcopy(net.module)

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        value: Tensor = model(torch.tensor([step, 1 + rank]), 2 if joined else 1 + rank)
        return value

    def check() -> None:
        for p, exact in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad.to_dense(), exact.grad.to_dense())

    with net.join(enable=joined):
        for step in range(2 + comm.rank if joined else 2):
            net.zero_grad()
            loss(net, step, comm.rank).backward()
            twin.zero_grad()
            ranks = [r for r in range(comm.size) if not joined or step < 2 + r]
            sum((loss(twin, step, r) for r in ranks), torch.zeros(())).div(comm.size).backward()
            check()
    check()  # what rank 0 has shadowed is not its own


# ---- beyond one forward and one backward in turn

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
    model = Branches(0, differ=False) if unused else mlp()
    first = DistributedDataParallel(model, find_unused_parameters=unused)
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
                backward(net, step, comm.rank)
        loss(net(rows(9, comm.rank))).backward()
        started.append(net.reducer.started)
    buckets = len(net.reducer.buckets)
    assert all(0 < n < buckets for n in started)
    return [p.flatten().tolist() for p in net.parameters()]


@on_ranks(2)
def test_ranks_that_have_ended_shadow_a_backward_to_the_inputs_only(comm: Communicator) -> None:
    """One for each forward: the next backward must find them, too."""
    net = DistributedDataParallel(mlp(), process_group=comm, find_unused_parameters=True)
    alone = copy.deepcopy(net.module)
    with net.join():
        for step in range(2 * comm.rank):
            x = rows(step, comm.rank).requires_grad_()
            torch.autograd.grad(net(x).sum(), x)
            averages, own = backward(net, step, comm.rank), backward(alone, step, comm.rank)
            assert equal(averages, [g / 2 for g in own])


@on_ranks(2)
def test_a_rank_that_only_shadowed_a_static_graph_trains_with_the_others(
    comm: Communicator,
) -> list[list[float]]:
    """They know the graph by then, from a first backward that rank 0 did not run."""
    net = DistributedDataParallel(mlp(), process_group=comm, static_graph=True)
    with net.join():
        for step in range(2 * comm.rank):
            backward(net, step, comm.rank)
    assert not net.reducer.flights  # buckets are free for the next
    return [g.flatten().tolist() for g in backward(net, 9, comm.rank)]


@pytest.mark.parametrize("torchs", [False, True])
@on_ranks(2)
def test_a_copy_can_join(comm: Communicator, torchs: bool) -> list[float]:
    """Rank 0 has no inputs at all, but the copy must still make its reducer."""
    gloo()
    net = copy.deepcopy(DistributedDataParallel(nn.Linear(WIDTH, 3)))
    with Join([net]) if torchs else net.join():
        for step in range(2 * comm.rank):
            backward(net, step, comm.rank)
    return [v for p in net.parameters() for v in p.flatten().tolist()]
