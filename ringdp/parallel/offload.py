"""Offload to host memory: of optimizer state alone, or of parameters too.

With either, masters, the gradients that the optimizer reads, and the optimizer's state are on the
host, where the optimizer steps. With `parameters` the device keeps nothing of a unit between its
uses; without, it keeps a shard in the compute dtype to gather from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.parallel.stages import Stage


@dataclass(frozen=True)
class Offload:
    """optimizer: offload masters, their gradients and the optimizer's state (stages 1 to 3).
    parameters: these, and the shards that stage 3 gathers from. pin: page-lock that memory if there
    is a GPU, so that copies are faster and asynchronous."""

    parameters: bool = False
    optimizer: bool = False
    pin: bool = True

    def check(self, stage: Stage) -> None:
        """Raise UsageError if the stage has nothing to offload."""
        if self.parameters and not stage.freed:
            raise UsageError(f"Offload(parameters=True) in stage {stage.number}; it needs stage 3")
        if self.optimizer and not stage.slices:
            raise UsageError(f"Offload(optimizer=True) in stage {stage.number}; it needs 1, 2 or 3")

    @property
    def any(self) -> bool:
        return self.parameters or self.optimizer

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat buffer in host memory."""
        return torch.empty(
            elements, dtype=dtype, pin_memory=self.pin and torch.cuda.is_available(), device="cpu"
        )
