"""What torch's FSDP moves by itself: models built on the CPU or the meta device, and inputs.

No GPU is needed: the meta device differs from the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import UsageError
from ringdp.parallel.mesh import move_to_ranks
from ringdp.parallel.values.inputs import move_inputs
from tests.parallel.small import batch, net


class InputRecorder(nn.Module):
    """Records the devices of its inputs, and appends to the list among them."""

    def forward(self, x: Tensor, found: list[Tensor], scale: Tensor) -> Tensor:
        self.devices = [t.device.type for t in (x, *found, scale)]
        found.append(x)
        return x


def add_hook(register: Callable[..., object], call: object, **options: object) -> None:
    register(call, **options)


def test_inputs_are_moved_and_lists_stay_the_callers():
    model, kept, x = InputRecorder(), torch.ones(1), torch.ones(2)
    found = [kept]
    move_inputs(model, torch.device("meta"), add_hook)
    assert model(x, found, scale=torch.ones(1)).is_meta
    assert model.devices == 3 * ["meta"]
    assert found[0] is kept
    assert found[1] is x
    there: Any = (torch.ones(1, device="meta"), [], torch.ones(1, device="meta"))
    assert model(*there) is there[0]


def test_on_the_cpu_nothing_is_moved():
    move_inputs(InputRecorder(), torch.device("cpu"), None)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    before = [p.data_ptr() for p in model.parameters()]
    with ringdp.init() as comm:
        move_to_ranks(model, comm)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_device_id_can_be_the_models_device():
    comm = ringdp.init()
    model = ringdp.FullyShardedDataParallel(net(), comm, device_id=torch.device("cpu"))
    assert model.engine.device == torch.device("cpu")
    assert torch.equal(model(batch()), net()(batch()))
    model.engine.close()


def test_a_meta_model_is_filled_by_fully_shard():
    comm = ringdp.init()
    with torch.device("meta"):
        model = net()

    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.fill_(0.5)

    for block in model[1:]:
        ringdp.fully_shard(block, comm=comm, init=init)
    sharded: Any = ringdp.fully_shard(model, comm=comm, init=init)
    with pytest.raises(UsageError, match=r"to_empty is not implemented; .* init="):
        sharded.to_empty(device="cpu")
    with sharded.engine.full_parameters():
        assert all(torch.all(p == 0.5) for p in sharded.parameters())
        sharded.engine.close()
