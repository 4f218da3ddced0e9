"""DistributedDataParallel: stage 0 of the engine behind torch's name."""

from __future__ import annotations

from typing import Any

from torch import nn

from ringdp.comm import Communicator
from ringdp.parallel.engine import shard
from ringdp.parallel.units import UnitRule


class DistributedDataParallel(nn.Module):
    """Averages `module`'s gradients over all ranks while backward runs, as torch's class does.

    `module` keeps its parameters and is reached as `.module`; their values, and the buffers', are
    rank 0's at first. A unit is what is reduced together: see `shard`.
    """

    def __init__(
        self, module: nn.Module, *, unit: UnitRule | None = None, comm: Communicator | None = None
    ) -> None:
        super().__init__()
        self.engine = shard(module, stage=0, unit=unit, comm=comm)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
