"""Moves models and inputs to the rank's GPU, as torch's FSDP and DDP do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.utils import _recursive_to

from ringdp.comm import Communicator, communicator_of
from ringdp.parallel.guards.copies import AddHook
from ringdp.parallel.values.inputs import change_inputs


def move(model: nn.Module, device: torch.device) -> None:
    """Move what is on the CPU. Parameters stay the same objects."""
    for t in (*model.parameters(), *model.buffers()):
        if t.device.type == "cpu":
            t.data = t.data.to(device)


def move_to_ranks(
    model: nn.Module, ranks: Communicator | ProcessGroup | None, device: torch.device | None = None
) -> Communicator:
    """Move the model to `device`, by default the communicator's. Returns the communicator (see
    `communicator_of`)."""
    if device is None:
        placed = [t for t in model.parameters() if t.device.type != "cpu"]
        device = communicator_of(ranks, placed).device
    move(model, device)
    return communicator_of(ranks, model.parameters())


def moved(given: Any, device: torch.device) -> Any:
    """The same structure with every tensor on `device`; unchanged parts are not copied."""
    return _recursive_to(given, device, False)[0]


def move_inputs(model: nn.Module, device: torch.device, add_hook: AddHook) -> None:
    """Move the model's inputs to `device`, if that is a GPU."""
    if device.type != "cpu":
        change_inputs(model, lambda given: moved(given, device), add_hook)
