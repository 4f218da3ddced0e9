"""Runs a script that calls `fully_shard` with ours, and with torch's over gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from ringdp import Communicator
from ringdp.parallel import fronts
from tests.parallel.ddp.cases import gloo

T = TypeVar("T")


def ours_and_torchs(comm: Communicator, script: Callable[[Any], T]) -> tuple[T, T]:
    """The results of `script` with either function."""
    gloo()
    return script(partial(fronts.fully_shard, comm=comm)), script(torchs_fully_shard)
