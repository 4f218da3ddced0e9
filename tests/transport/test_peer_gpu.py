"""The peer-memory transport on a GPU: processes map each other's windows by CUDA IPC.

Two processes share one GPU, which runs their kernels alternately; that is slow but correct.
Collectives within one process are in test_peer.py, the transport over host memory in
test_peer_transport.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

import ringdp
from ringdp import Communicator
from tests.comm.failing import Caught, catch
from tests.ranks import Pool
from tests.transport.device_bodies import all_reduce_on_gpu, ddp, replay_captured_all_reduce
from tests.transport.over import over_gpu
from tests.transport.peer_build import reason_to_skip
from tests.transport.test_conformance import ALGORITHMS, Case, expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
]
# seconds; less than `make gpu` gives to all of these tests, so one that hangs lets the others run
LIMIT = 22.0


@pytest.fixture
def pool(gpu_ranks) -> Pool:
    return gpu_ranks(2, LIMIT)


@pytest.fixture
def on_gpu(pool) -> Callable[..., list[Any]]:
    return partial(pool, over_gpu, "peer", LIMIT)


def test_two_processes_on_a_gpu_give_the_simulators_bits(on_gpu):
    cases = [
        Case("all_reduce", name, elements, dtype)
        for name, elements, dtype in product(
            ALGORITHMS["all_reduce"], (0, 10_007), ("float32", "bfloat16")
        )
    ]
    cases += [Case("all_reduce", name, 3_000_001, "float32") for name in ("ring", "direct")]
    by_rank = on_gpu(all_reduce_on_gpu, cases)
    for i, case in enumerate(cases):
        assert [found[i] for found in by_rank] == expected(case, 2), case


def test_a_collective_can_be_captured_in_a_cuda_graph(on_gpu):
    on_gpu(replay_captured_all_reduce)


def test_ddp_trains_and_sends_as_over_shared_memory(on_gpu, pool):
    for here, there in zip(on_gpu(ddp, "cuda"), pool(ddp), strict=True):
        assert here.sent == there.sent
        # GPU and CPU round sums of the same products in different orders, a few times per step.
        for step, (a, b) in enumerate(zip(here.losses, there.losses, strict=True)):
            assert abs(a - b) <= 1e-3 * (1 + step) * abs(b)


def kill_rank_1(comm: Communicator) -> Caught | None:
    torch.cuda.set_device(0)
    c = ringdp.init(transport="peer", timeout=LIMIT)
    c.all_reduce(torch.ones(5000, device="cuda"))
    torch.cuda.synchronize()
    c.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(5000, device="cuda")
    return catch(c, lambda: c.all_reduce(x), torch.cuda.synchronize, c.barrier)


def test_a_killed_rank_is_named_and_the_kernel_ends(pool):
    (first, second) = pool.outcomes(kill_rank_1)
    assert second is None
    assert first.error == first.again == "PeerLost", first
    assert "rank 1 has ended" in first.text
