"""Runs scripts that call `fully_shard` with ours, and with torch's over gloo; a model for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from ringdp import Communicator
from ringdp.parallel import fronts
from tests.parallel.ddp.cases import gloo
from tests.parallel.small import WIDTH, net

T = TypeVar("T")


class Scaled(nn.Module):
    """Its root has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = net(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x) * self.scale
        return out


def ours_and_torchs(comm: Communicator, script: Callable[[Any], T]) -> tuple[T, T]:
    """The results of `script` with either function."""
    gloo()
    return script(partial(fronts.fully_shard, comm=comm)), script(torchs_fully_shard)
