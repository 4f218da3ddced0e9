"""SyncBatchNorm equals torch's BatchNorm over the concatenated batches of all ranks."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, SyncBatchNorm
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

CHANNELS = 5
SIZES = [4, 0, 7]  # rows of each rank


def batch(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SIZES[rank], CHANNELS, *shape, generator=seed) * 3 + 7


def layer(**options: object) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(CHANNELS, **options)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    norm._check_input_dim = lambda x: None  # accepts any shape
    return norm


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}]
)
@on_ranks(3)
def test_sync_batch_norm_equals_batch_norm_over_all_ranks(
    comm: Communicator, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    whole = layer(**options)
    del whole._check_input_dim
    mine = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(copy.deepcopy(whole)), comm)[0]
    assert isinstance(mine, SyncBatchNorm)
    whole._check_input_dim = lambda x: None
    for step in range(2):
        parts = [batch(r, step, shape).requires_grad_() for r in range(comm.size)]
        weights = [torch.cos(p.detach()) for p in parts]
        expected = whole(torch.cat(parts))
        (expected * torch.cat(weights)).sum().backward()
        x = batch(comm.rank, step, shape).requires_grad_()
        y = mine(x)
        (y * weights[comm.rank]).sum().backward()
        close(y, expected.split(SIZES[: comm.size])[comm.rank])
        close(x.grad, parts[comm.rank].grad)
    for p, q in zip(mine.parameters(), whole.parameters(), strict=True):
        comm.all_reduce(p.grad)
        close(p.grad, q.grad)
    for a, b in zip(mine.buffers(), whole.buffers(), strict=True):
        close(a, b)
    mine.eval(), whole.eval()
    if mine.running_mean is not None:
        close(mine(batch(0, 9, shape)), whole(batch(0, 9, shape)))


@on_ranks(2)
def test_sync_batch_norm_trains_under_ddp(comm: Communicator) -> list[list[float]]:
    torch.manual_seed(comm.rank)
    net = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Linear(5, 1))
    net = ringdp.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(torch.randn(6, CHANNELS) + step).square().mean().backward()
        optimizer.step()
    again = pickle.loads(pickle.dumps(net.module))
    assert torch.equal(again.eval()(torch.ones(2, 5)), net.module.eval()(torch.ones(2, 5)))
    return [t.flatten().tolist() for t in net.state_dict().values()]


@on_ranks(2)
def test_statistics_are_not_tracked_where_torchs_are_not(comm: Communicator) -> None:
    """Running statistics stay unchanged; without them rank 0 can evaluate alone, with its own rows'
    statistics."""
    x = batch(0, 0, (3,))
    norm, theirs = SyncBatchNorm(CHANNELS, process_group=comm), nn.BatchNorm1d(CHANNELS)
    norm.track_running_stats = theirs.track_running_stats = False
    norm(x), theirs(x)
    for a, b in zip(norm.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b)
    norm = SyncBatchNorm(CHANNELS, track_running_stats=False, process_group=comm)
    theirs = nn.SyncBatchNorm(CHANNELS, track_running_stats=False)
    if comm.rank == 0:
        assert torch.equal(norm.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_only_the_input_is_kept_for_backward(comm: Communicator, dtype: torch.dtype) -> None:
    norm = SyncBatchNorm(CHANNELS, process_group=comm)
    x = batch(0, comm.rank, (3,)).to(dtype).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    large = [t for t in kept if t.numel() >= x.numel()]
    assert [t.data_ptr() for t in large] == [x.data_ptr()]


@on_ranks(2)
def test_without_rows_the_statistics_do_not_change(comm: Communicator) -> None:
    norm = SyncBatchNorm(CHANNELS, process_group=comm)
    norm(batch(0, comm.rank, (3,)))
    before = [b.clone() for b in norm.buffers()]
    x = torch.ones(0, CHANNELS, 3, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.shape == x.shape
    for p in norm.parameters():
        assert p.grad.tolist() == [0] * CHANNELS
    for a, b in zip(norm.buffers(), before, strict=True):
        assert torch.equal(a, b)


@on_ranks(2)
def test_a_copy_uses_the_same_ranks(comm: Communicator) -> None:
    """A copy synchronises with the original's ranks, here this one alone, not with those of
    ringdp.init."""
    alone = comm.split(comm.rank)
    net = nn.Sequential(SyncBatchNorm(CHANNELS, process_group=alone))
    twin = copy.deepcopy(net)
    assert twin[0].process_group is alone
    assert twin[0].weight is not net[0].weight
    x = batch(0, comm.rank, (3,))
    assert torch.equal(twin(x), net(x))
    for a, b in zip(twin.buffers(), net.buffers(), strict=True):
        assert a is not b
        assert torch.equal(a, b)


@on_ranks(2)
def test_gradients_cannot_be_differentiated_again(comm: Communicator) -> None:
    """A gradient penalty would lack the derivative of the sums over the ranks."""
    x = torch.randn(4, CHANNELS, requires_grad=True)
    y = SyncBatchNorm(CHANNELS, process_group=comm)(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


@on_ranks(1)
def test_a_wrong_shape_is_refused(comm: Communicator) -> None:
    norm = SyncBatchNorm(3, process_group=comm)
    for shape in ((3,), (2, 4)):
        with pytest.raises(ringdp.UsageError, match=r"must be \[rows, 3"):
            norm(torch.ones(shape))


def test_it_evaluates_in_every_combination_of_dtypes_that_it_trains_in() -> None:
    """The weights have another than the buffers under Precision."""
    x, dtypes = torch.tensor([[5.0], [-3.0]]), (torch.bfloat16, torch.float32, torch.float64)
    for given, of_weights, of_buffers in product(dtypes, repeat=3):
        norm = SyncBatchNorm(1, eps=1.0).eval()
        tensors = norm.weight, norm.bias, norm.running_mean, norm.running_var
        for t, value in zip(tensors, (2.0, 0.5, 1.0, 3.0), strict=True):
            t.data = torch.full_like(t, value, dtype=of_weights if t.requires_grad else of_buffers)
        y = norm(x.to(given))
        assert y.dtype == given
        assert torch.equal(y.double(), torch.tensor([[4.5], [-3.5]], dtype=torch.float64))
