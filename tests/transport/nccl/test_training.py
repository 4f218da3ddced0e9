"""DDP and the stages over the host NCCL: the losses and parameters of shared memory, to the bit."""

from __future__ import annotations

import pytest
import torch

import ringdp
from ringdp import Communicator
from tests.parallel.test_engine import batch, equal, model, train
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.over import over_nccl

only_with_host_nccl()
pytestmark = pytest.mark.process

STEPS = 3


@over_nccl
def staged(comm: Communicator, stage: int) -> tuple[list[float], list[torch.Tensor], list[int]]:
    run = train(comm, stage)
    return run.losses, run.parameters, run.sent


def over_shm(comm: Communicator, stage: int) -> tuple[list[float], list[torch.Tensor], list[int]]:
    run = train(comm, stage)
    return run.losses, run.parameters, run.sent


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_trains_as_over_shared_memory(ranks, stage: int):
    pool = ranks(2)
    for here, there in zip(pool(staged, stage), pool(over_shm, stage), strict=True):
        assert here[0] == there[0]
        assert equal(here[1], there[1])
        assert here[2] == there[2], "bytes sent"


def ddp(comm: Communicator) -> tuple[list[float], list[torch.Tensor]]:
    net = model(comm.rank)
    wrapped = ringdp.DistributedDataParallel(net, process_group=comm)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = wrapped(batch(step)[comm.rank :: comm.size]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in net.parameters()]


ddp_over_nccl = over_nccl(ddp)


def test_ddp_trains_as_over_shared_memory(ranks):
    pool = ranks(2)
    for here, there in zip(pool(ddp_over_nccl), pool(ddp), strict=True):
        assert here[0] == there[0]
        assert equal(here[1], there[1])
