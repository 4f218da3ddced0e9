"""Which communicator a torch.distributed group stands for: over what its ranks' tensors need."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup

from ringdp.comm import communicator_of, resolve


class Of(ProcessGroup):
    """A group whose backends serve these devices."""

    def __init__(self, *devices: str) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.devices = devices

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(d) for d in self.devices]


class Made(NamedTuple):
    group: ProcessGroup
    transport: str
    ended: bool = False


def somewhere(device: str) -> Tensor:
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
    monkeypatch.setattr(resolve, "last", lambda: None)
    monkeypatch.setattr(resolve, "over", lambda group, transport: Made(group, transport))
    return devices


@pytest.mark.parametrize(
    ("serves", "where", "transport"),
    [
        (["cuda"], ["cuda:1"], "nccl"),  # init_process_group("nccl"), a model on a GPU
        (["cpu", "cuda"], ["cuda:1"], "nccl"),  # "cpu:gloo,cuda:nccl"
        (["cpu", "cuda"], ["cpu"], "shm"),
        (["cpu", "cuda"], [], "shm"),
        (["cuda"], ["cpu"], "shm"),
        (["cuda"], [], "nccl"),
        (["cuda"], ["meta"], "nccl"),  # its values come later, to where the ranks move them
        (["cpu", "cuda"], ["meta"], "shm"),
        (["cpu"], ["meta", "cuda:1"], "nccl"),
    ],
)
def test_a_group_goes_over_what_the_tensors_need(
    current: list[torch.device], serves: list[str], where: list[str], transport: str
) -> None:
    found = communicator_of(Of(*serves), map(somewhere, where))
    assert found.transport == transport
    assert current == [torch.device("cuda:1")] * ("cuda:1" in where)


def test_a_group_has_one_of_each(current: list[torch.device]) -> None:
    group = Of("cpu", "cuda")
    here, there = communicator_of(group), communicator_of(group, [somewhere("cuda")])
    assert communicator_of(group, [somewhere("cpu")]) is here
    assert communicator_of(group, [somewhere("cuda")]) is there is not here
