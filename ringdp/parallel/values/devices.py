"""Models and inputs go to the GPU that a rank trains on, as torch's FSDP and DDP have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.utils import _recursive_to
from torch.utils.hooks import RemovableHandle

from ringdp.comm import Communicator, communicator_of
from ringdp.parallel.guards.copies import Own
from ringdp.parallel.values.inputs import change_inputs


def move(model: nn.Module, device: torch.device) -> None:
    """What of it is on the CPU. Its parameters stay the same objects."""
    for t in (*model.parameters(), *model.buffers()):
        if t.device.type == "cpu":
            t.data = t.data.to(device)


def move_to_ranks(
    model: nn.Module, ranks: Communicator | ProcessGroup | None, device: torch.device | None = None
) -> Communicator:
    """That of `ranks`, as `communicator_of` has it. The model goes to `device`, or where they move
    tensors best."""
    if device is None:
        placed = [t for t in model.parameters() if t.device.type != "cpu"]
        device = communicator_of(ranks, placed).device
    move(model, device)
    return communicator_of(ranks, model.parameters())


def moved(given: Any, device: torch.device) -> Any:
    """The same structure with every tensor there. What has all there stays, as the same object."""
    return _recursive_to(given, device, False)[0]


def move_inputs(model: nn.Module, device: torch.device, own: Own) -> list[RemovableHandle]:
    """From now on, to a GPU: hooks of its calls."""
    if device.type == "cpu":
        return []
    return change_inputs(model, lambda given: moved(given, device), own)
