"""Which transport the communicator of a torch.distributed group uses, by the devices of the
tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup

from ringdp.comm import communicator_of, rendezvous


class StubGroup(ProcessGroup):
    """A group whose backends serve these devices."""

    def __init__(self, *devices: str) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.devices = devices

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(d) for d in self.devices]


class StubCommunicator(NamedTuple):
    group: ProcessGroup
    transport: str
    ended: bool = False


def tensor_on(device: str) -> Tensor:
    with FakeTensorMode():
        return torch.empty(2, device=device)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were made current."""
    devices: list[torch.device] = []

    def device(at: torch.device) -> nullcontext[None]:
        devices.append(at)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(rendezvous, "last", lambda: None)
    monkeypatch.setattr(
        rendezvous, "over", lambda group, transport: StubCommunicator(group, transport)
    )
    return devices


@pytest.mark.parametrize(
    ("serves", "where", "transport"),
    [
        (["cuda"], ["cuda:1"], "nccl"),  # init_process_group("nccl") and a model on a GPU
        (["cpu", "cuda"], ["cuda:1"], "nccl"),  # "cpu:gloo,cuda:nccl"
        (["cpu", "cuda"], ["cpu"], "shm"),
        (["cpu", "cuda"], [], "shm"),
        (["cuda"], ["cpu"], "shm"),
        (["cuda"], [], "nccl"),
        # meta tensors get their values later, on the device of the ranks
        (["cuda"], ["meta"], "nccl"),
        (["cpu", "cuda"], ["meta"], "shm"),
        (["cpu"], ["meta", "cuda:1"], "nccl"),
    ],
)
def test_the_transport_depends_on_the_groups_and_tensors_devices(
    current: list[torch.device], serves: list[str], where: list[str], transport: str
) -> None:
    found = communicator_of(StubGroup(*serves), map(tensor_on, where))
    assert found.transport == transport
    assert current == [torch.device("cuda:1")] * ("cuda:1" in where)


def test_a_group_has_one_communicator_per_transport(current: list[torch.device]) -> None:
    group = StubGroup("cpu", "cuda")
    here, there = communicator_of(group), communicator_of(group, [tensor_on("cuda")])
    assert communicator_of(group, [tensor_on("cpu")]) is here
    assert communicator_of(group, [tensor_on("cuda")]) is there is not here
