"""device_ids and output_device must name the one device of the parameters; inputs are moved there.

No GPU is needed: the meta device differs from the CPU, and fake tensors can be on any device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ringdp
from ringdp import DistributedDataParallel, UsageError
from ringdp.parallel.ddp.arguments import place


class InputRecorder(nn.Module):
    """Records its inputs, and appends a tensor to the list among them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device="meta"))

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        self.others, self.named = others, named
        named["found"].append(self.weight)
        return x * self.weight


def wrap(**given: Any) -> Any:
    comm = ringdp.init()
    return DistributedDataParallel(InputRecorder(), process_group=comm, init_sync=False, **given)


def test_inputs_are_moved_as_by_torch():
    net = wrap(device_ids=["meta"], output_device=torch.device("meta"))
    found = [torch.ones(1)]
    rows = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert net(torch.ones(2), (torch.ones(1), "text"), rows, found=found).device.type == "meta"
    (pair, packed), named = net.module.others, net.module.named["found"]
    assert pair[0].device.type == "meta"
    assert pair[1] == "text"
    assert isinstance(packed, PackedSequence)
    assert packed.data.device.type == "meta"
    assert packed.batch_sizes.device.type == "cpu"
    assert named[0].device.type == "meta"
    assert found[0].device.type == "cpu"
    assert found[1] is net.module.weight  # what the module appended is in the caller's list


def test_without_device_ids_nothing_is_moved():
    net = wrap()
    net(torch.ones(2, device="meta"), one := torch.ones(1), found=[])
    assert net.module.others == (one,)
    assert net.module.others[0] is one
    assert net.device_ids is None
    assert net.output_device is None


def tensors_on(*devices: str) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(2, device=device) for device in devices]


@pytest.mark.parametrize("name", [1, "cuda:1", "cuda", torch.device("cuda", 1)])
def test_every_spelling_of_the_device_is_accepted(name):
    for output_device in (None, name):
        assert place(tensors_on("cuda:1", "cuda:1"), [name], output_device) == torch.device(
            "cuda", 1
        )


@pytest.mark.parametrize(
    ("devices", "device_ids", "output_device"),
    [
        (["cpu"], [0], None),
        (["cpu"], ["cpu"], None),
        (["cpu"], None, 1),
        (["cuda:0"], [1], None),
        (["cuda:1"], ["cuda:0"], None),
        (["cuda:1"], [1], 0),
        (["cuda:0"], None, "cuda:0"),
        (["cuda:0"], [0, 1], None),
        (["cuda:0", "cuda:1"], [0], None),
    ],
)
def test_another_device_is_refused(devices, device_ids, output_device):
    with pytest.raises(UsageError, match=f"parameters on {', '.join(devices)}; allowed"):
        place(tensors_on(*devices), device_ids, output_device)


@pytest.mark.parametrize("device_ids", [None, []])
def test_no_device_ids_mean_no_device(device_ids):
    for output_device in (None, 0):
        assert place(tensors_on("cpu"), device_ids, output_device) is None
