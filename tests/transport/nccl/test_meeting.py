"""Two processes on one GPU, each a host of its own, come together over NCCL and add two numbers.

First, and with little time: where NCCL does not do that, all of test_gpu.py would hang.
"""

from __future__ import annotations

import pytest
import torch

from ringdp import Communicator
from tests.transport.over import over_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def added(comm: Communicator) -> list[float]:
    x = torch.full((2,), float(comm.rank + 1), device="cuda")
    comm.all_reduce(x)
    found: list[float] = x.tolist()
    return found


def test_two_processes_of_one_gpu_add(gpu_ranks):
    assert gpu_ranks(2, 22.0)(over_gpu, "nccl", 60.0, added) == [[3.0, 3.0]] * 2
