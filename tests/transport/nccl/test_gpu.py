"""The NCCL transport on a GPU: two processes on one device, graphs, and training.

NCCL takes two processes on one device for two hosts if each has its own NCCL_HOSTID, and then uses
sockets, which is slow but correct. Whole collectives within one process are in test_virtual.py, the
engine on one rank in test_alone.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringdp
from ringdp import Communicator
from tests.parallel.test_engine import WIDTH
from tests.ranks import Pool
from tests.transport.device_bodies import (
    adafactor,
    all_reduce_on_gpu,
    from_pieces,
    in_replicas,
    replay_captured_all_reduce,
    train_clipped,
)
from tests.transport.over import over_gpu
from tests.transport.test_conformance import ALGORITHMS, Case, expected

pytestmark = [pytest.mark.gpu, pytest.mark.process]


# seconds; less than `make gpu` gives to all of these tests, so one that hangs lets the others run
LIMIT = 40.0


@pytest.fixture
def pool(gpu_ranks) -> Pool:
    return gpu_ranks(2, LIMIT)


@pytest.fixture
def on_gpu(pool) -> Callable[..., list[Any]]:
    return partial(pool, over_gpu, "nccl", LIMIT)


def test_two_processes_on_a_gpu_give_the_simulators_bits(on_gpu):
    cases = [
        Case("all_reduce", name, elements, dtype, op)
        for name in ALGORITHMS["all_reduce"]
        for elements in (0, 1, 10_007, 3_000_001)
        for dtype, op in (("float32", "sum"), ("bfloat16", "sum"), ("int32", "max"))
    ]
    by_rank = on_gpu(all_reduce_on_gpu, cases)
    for i, case in enumerate(cases):
        assert [found[i] for found in by_rank] == expected(case, 2), case


def test_a_collective_can_be_captured_in_a_cuda_graph(on_gpu):
    on_gpu(replay_captured_all_reduce)


def check_shared_queue(comm: Communicator) -> None:
    with comm.duplicate() as other:
        assert other._transport._launches is comm._transport._launches
        xs = [torch.ones(1000, device="cuda") for _ in range(2)]
        for c, x in zip((other, comm), xs, strict=True):
            c.all_reduce(x)
        assert all(torch.all(x == comm.size) for x in xs)


def test_communicators_of_a_device_share_a_queue(on_gpu):
    on_gpu(check_shared_queue)


def all_reduce_with_torch(comm: Communicator) -> None:
    store = dist.PrefixStore("beside", comm._connect.store)
    dist.init_process_group("nccl", store=store, rank=comm.rank, world_size=comm.size)
    for _ in range(3):
        ours, theirs = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
        comm.all_reduce(ours)
        dist.all_reduce(theirs)
        assert torch.equal(ours, theirs)
    dist.destroy_process_group()


def test_ringdp_and_torchs_nccl_group_work_in_one_process(on_gpu):
    on_gpu(all_reduce_with_torch)


def test_stage_3_has_the_cpus_losses(on_gpu, pool):
    """In every step each of 5 layers rounds sums of WIDTH products, forwards and backwards."""
    for here, there in zip(on_gpu(train_clipped, "cuda"), pool(train_clipped), strict=True):
        for i, (found, expected_value) in enumerate(zip(here, there, strict=True)):
            bound = 2 * 5 * WIDTH * torch.finfo(torch.float32).eps * (1 + i // 2)
            assert abs(found - expected_value) <= bound * abs(expected_value)


@pytest.mark.parametrize(("trained", "n"), [(adafactor, 2), (in_replicas, 2), (from_pieces, 4)])
def test_whole_parameters_and_parts_of_the_ranks_have_the_cpus_losses(gpu_ranks, trained, n):
    """As above. The updates' relative errors are those of the gradients."""
    pool = gpu_ranks(n, LIMIT)
    found = pool(over_gpu, "nccl", LIMIT, trained, "cuda")
    for here, there in zip(found, pool(trained), strict=True):
        for i, (found, expected_value) in enumerate(zip(here.losses, there.losses, strict=True)):
            bound = 2 * 5 * WIDTH * torch.finfo(torch.float32).eps * (1 + i)
            assert abs(found - expected_value) <= bound * abs(expected_value)


def peak_bytes(comm: Communicator) -> tuple[int, int]:
    """Peak bytes of a stage 3 step, as counted by torch's allocator and by the engine."""
    width, layers = 1024, 64
    rows = torch.randn(1, width, device="cuda")

    def train(layers: int) -> tuple[int, int]:
        parts = (torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        net = torch.nn.Sequential(*parts).cuda()
        engine = ringdp.shard(net, stage=3, unit=torch.nn.Linear, comm=comm)
        optimizer = ringdp.AdamW(net.parameters())
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            net(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated(), sum(engine.memory(optimizer))
        engine.close()
        return found

    train(2)  # cuBLAS keeps a workspace, 32 MiB on Hopper, per stream and thread
    gc.collect()
    before = torch.cuda.memory_allocated()
    found, account = train(layers)
    return found - before, account


def test_allocated_memory_equals_the_engines_account(on_gpu):
    """The difference: activations of one row, a unit's gradient before it is in its bucket, and
    staging."""
    for found, account in on_gpu(peak_bytes):
        assert abs(found - account) <= 0.03 * account
