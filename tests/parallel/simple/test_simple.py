"""Naive data parallelism and the parameter server: gradients, bytes and staleness."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator
from ringdp.parallel.simple import DataParallel, RemoteOptimizer, serve, serve_each

pytestmark = pytest.mark.process

WIDTH, ROWS, STEPS = 7, 4, 3  # ROWS per rank


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    net[2].weight = net[0].weight  # tied
    return net


def batch(step: int, rank: int) -> Tensor:
    seed = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=seed)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_give_one_models_gradients_and_copy_the_formulas_bytes(replicas):
    single, net = model(), DataParallel(model(), replicas)
    x = torch.cat([batch(0, r) for r in range(replicas)])
    for m in (single, net):
        m(x).square().mean().backward()
    for p, q in zip(net.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    size = sum(p.nbytes for p in single.parameters())
    moved = 2 * (replicas - 1) * size + (replicas - 1) * (x.nbytes + 2 * x.nbytes) // replicas
    assert net.copied == moved
    with torch.no_grad():
        # a matrix product may sum more rows in another order
        parts = [single(part) for part in x.chunk(replicas)]
        assert torch.equal(net(x), torch.cat(parts))


def test_replicas_compute_in_autocasts_dtype():
    single, net, x = model(), DataParallel(model(), 2), batch(0, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert single(x).dtype == net(x).dtype == torch.bfloat16


def test_replicas_add_gradients_in_the_same_order_every_time():
    """With tied weights, which make the order of additions depend on the order of threads."""
    net, found = DataParallel(model(), 3), set[bytes]()
    x = torch.cat([batch(0, r) for r in range(3)])
    for step in range(50):
        net.zero_grad()
        net(x).square().mean().backward()
        if step:  # in the first, this thread may have made as few nodes of graphs as the others
            found.add(net.module[0].weight.grad.numpy().tobytes())
    assert len(found) == 1


def train(comm: Communicator, kind: str) -> tuple[list[float], list[int], int]:
    """(parameters, staleness, bytes sent per step); rank 0 is the server."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    before, staleness = comm.sent_bytes(), list[int]()
    if comm.rank == 0 and kind == "async":
        staleness = serve_each(net, optimizer, comm, STEPS)
    elif comm.rank == 0:
        serve(net, optimizer, comm, STEPS)
    else:
        remote = RemoteOptimizer(net, comm, scale=1 / (comm.size - 1))
        for step in range(STEPS):
            remote.zero_grad()
            net(batch(step, comm.rank - 1)).square().mean().backward()
            if kind == "async" and comm.rank == 1:
                time.sleep(0.05)  # a slow worker
            remote.step()
    values = [x for p in net.parameters() for x in p.flatten().tolist()]
    return values, staleness, (comm.sent_bytes() - before) // STEPS


def ddp(comm: Communicator) -> list[float]:
    net = ringdp.DistributedDataParallel(model(), process_group=comm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(step, comm.rank)).square().mean().backward()
        optimizer.step()
    return [x for p in net.parameters() for x in p.flatten().tolist()]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_synchronous_server_has_the_bits_of_ddp(ranks, workers):
    found = ranks(workers + 1)(train, "synchronous")
    expected = ranks(workers)(ddp)[0]
    assert all(values == expected for values, _, _ in found)
    size = 4 * sum(p.numel() for p in model().parameters())
    assert [sent for _, _, sent in found] == [workers * size] + [size] * workers


def test_an_asynchronous_server_counts_staleness(ranks):
    (server, staleness, sent), *workers = ranks(3)(train, "async")
    assert len(staleness) == 2 * STEPS
    assert staleness[0] == 0
    # A gradient's staleness is the number of others' steps since its worker last got parameters.
    assert sum(staleness) >= STEPS - 1
    assert max(staleness) <= STEPS
    assert server in [values for values, _, _ in workers], (
        "the worker answered last has the server's parameters"
    )
    assert sent == 2 * 4 * sum(p.numel() for p in copy.deepcopy(model()).parameters())


def test_one_worker_is_never_stale(ranks):
    (_, staleness, _), _ = ranks(2)(train, "async")
    assert staleness == [0] * STEPS
