"""torch's own DDP and FSDP2 have the same losses over the backend as over gloo, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringdp import Communicator
from ringdp.cli import gpt
from tests.comm.backend.jobs import world
from tests.forks import Report

pytestmark = pytest.mark.process

SHAPE = gpt.Shape(context=16, width=32, heads=2, blocks=2)
STEPS = 4


def ddp(model: gpt.GPT) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.02)  # type: ignore[arg-type]


def ddp_unused(model: gpt.GPT) -> nn.Module:
    model.unused = nn.Linear(3, 3)
    return DistributedDataParallel(model, find_unused_parameters=True)


def ddp_sparse(model: gpt.GPT) -> nn.Module:
    model.position.sparse = True
    return DistributedDataParallel(model)


def fsdp2(model: gpt.GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def fsdp2_mixed(model: gpt.GPT) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def fsdp2_allocated(model: gpt.GPT) -> nn.Module:
    """Allocates what is gathered and reduced from the group's memory."""
    net = fsdp2(model)
    for module in net.modules():
        if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return net


def losses(wrap: Callable[[gpt.GPT], nn.Module], rank: int) -> list[float]:
    model = wrap(gpt.build(SHAPE, seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(STEPS):
        rows = torch.randint(gpt.VOCABULARY, (2, SHAPE.context + 1), generator=seed)
        optimizer.zero_grad()
        loss = gpt.next_byte_loss(model, rows)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def train(comm: Communicator, report: Report, names: list[str]) -> None:
    for backend in ("gloo", "ringdp"):
        for name in names:
            if backend == "gloo" and name == "fsdp2_allocated":
                continue
            with world(comm, backend, name):
                report((backend, name, losses(globals()[name], comm.rank)))


def train_over_both_backends(forks, names: list[str]) -> dict[tuple[str, str], list[list[float]]]:
    found: dict[tuple[str, str], list[list[float]]] = {}
    for ended in forks(2, train, names):
        assert ended.code == 0
        for backend, name, numbers in ended.reported:
            found.setdefault((backend, name), []).append(numbers)
    return found


def test_ddp_has_gloos_losses(forks):
    names = ["ddp", "ddp_unused", "ddp_sparse"]
    found = train_over_both_backends(forks, names)
    for name in names:
        assert found["ringdp", name] == found["gloo", name]
    first, *_, last = found["ringdp", "ddp"][0]
    assert last < first


def test_fsdp2_has_gloos_losses(forks):
    found = train_over_both_backends(forks, ["fsdp2", "fsdp2_mixed", "fsdp2_allocated", "ddp"])
    assert found["ringdp", "fsdp2"] == found["gloo", "fsdp2"] == found["ringdp", "ddp"]
    assert found["ringdp", "fsdp2_mixed"] == found["gloo", "fsdp2_mixed"]
    assert found["ringdp", "fsdp2_allocated"] == found["gloo", "fsdp2"]
