"""Two processes on one GPU, each posing as a host, connect over NCCL and add two numbers.

Runs first and with a short limit: where this fails, every test of test_gpu.py would hang.
"""

from __future__ import annotations

import pytest
import torch

from ringdp import Communicator
from tests.transport.over import over_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.process]

LIMIT = 32.0  # seconds, of which the start of the processes takes most


def add(comm: Communicator) -> list[float]:
    x = torch.full((2,), float(comm.rank + 1), device="cuda")
    comm.all_reduce(x)
    found: list[float] = x.tolist()
    return found


def test_two_processes_on_one_gpu_can_all_reduce(gpu_ranks):
    assert gpu_ranks(2, LIMIT)(over_gpu, "nccl", 60.0, add) == [[3.0, 3.0]] * 2
