"""The transport over peer memory on a GPU: processes that map each other's windows by CUDA IPC.

Here two of them share one GPU, which runs their kernels by turns: right, and slow. Collectives in
one process are in test_peer.py, the transport over host memory in test_peer_transport.py.
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
from tests.comm.failing import Heard, hear
from tests.ranks import Pool
from tests.transport.device_bodies import all_reduced, captured, ddp
from tests.transport.over import over_gpu
from tests.transport.peer_build import missing
from tests.transport.test_conformance import ALGORITHMS, Case, expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
LIMIT = 14.0  # seconds: less than `make gpu` gives all of them, so that the others run


@pytest.fixture
def pool(gpu_ranks) -> Pool:
    return gpu_ranks(2, LIMIT)


@pytest.fixture
def on_gpu(pool) -> Callable[..., list[Any]]:
    return partial(pool, over_gpu, "peer", LIMIT)


def test_two_processes_give_the_simulators_bits(on_gpu):
    cases = [
        Case("all_reduce", name, elements, dtype)
        for name, elements, dtype in product(
            ALGORITHMS["all_reduce"], (0, 10_007), ("float32", "bfloat16")
        )
    ]
    cases += [Case("all_reduce", name, 3_000_001, "float32") for name in ("ring", "direct")]
    by_rank = on_gpu(all_reduced, cases)
    for i, case in enumerate(cases):
        assert [found[i] for found in by_rank] == expected(case, 2), case


def test_a_collective_in_a_cuda_graph(on_gpu):
    on_gpu(captured)


def test_ddp_sends_what_it_does_over_shared_memory(on_gpu, pool):
    for here, there in zip(on_gpu(ddp, "cuda"), pool(ddp), strict=True):
        assert here.sent == there.sent
        # Both devices round sums of the same products, in some order, a few times a step.
        for step, (a, b) in enumerate(zip(here.losses, there.losses, strict=True)):
            assert abs(a - b) <= 1e-3 * (1 + step) * abs(b)


def lost(comm: Communicator) -> Heard | None:
    torch.cuda.set_device(0)
    c = ringdp.init(transport="peer", timeout=LIMIT)
    c.all_reduce(torch.ones(5000, device="cuda"))
    torch.cuda.synchronize()
    c.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(5000, device="cuda")
    return hear(c, lambda: c.all_reduce(x), torch.cuda.synchronize, c.barrier)


def test_a_killed_rank_is_named_and_the_kernel_ends(pool):
    (first, second) = pool.outcomes(lost)
    assert second is None
    assert first.error == first.again == "PeerLost", first
    assert "rank 1 has ended" in first.text
