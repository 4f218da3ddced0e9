"""DDP and the stages over the host NCCL: the losses and parameters of shared memory, to the bit."""

from __future__ import annotations

import pytest

from ringdp import Communicator
from tests.transport.device_bodies import Trained, check_trained, clipped, ddp, staged
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.over import over_nccl

only_with_host_nccl()
pytestmark = pytest.mark.process


@over_nccl
def staged_over_nccl(comm: Communicator, stage: int) -> Trained:
    return staged(comm, stage)


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_trains_as_over_shared_memory(ranks, stage: int):
    pool = ranks(2)
    check_trained(pool(staged_over_nccl, stage), pool(staged, stage))


@over_nccl
def ddp_over_nccl(comm: Communicator) -> Trained:
    return ddp(comm)


def test_ddp_trains_as_over_shared_memory(ranks):
    pool = ranks(2)
    check_trained(pool(ddp_over_nccl), pool(ddp))


@over_nccl
def clipped_over_nccl(comm: Communicator) -> list[float]:
    return clipped(comm)


def test_gradients_are_scaled_and_clipped_as_over_shared_memory(ranks):
    pool = ranks(2)
    assert pool(clipped_over_nccl) == pool(clipped)
