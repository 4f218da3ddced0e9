"""torch's Join for DistributedDataParallel and ZeroRedundancyOptimizer: what both share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import group
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ringdp.comm import Communicator
from ringdp.errors import UsageError

Call = Callable[[], object]


class JoinableOverGroup(Joinable):
    """A Joinable. torch's Join counts the ranks that train over a torch.distributed group."""

    comm: Communicator
    _group: Any  # as given

    @property
    def process_group(self) -> Any:
        """As given; by default torch's default group if there is one, else the communicator."""
        return self._group or group.WORLD or self.comm

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        if isinstance(self.process_group, Communicator):
            raise UsageError(
                f"process_group is {self.process_group!r}; torch's Join counts ranks over a "
                "torch.distributed group: give the optimizer and the model such a one, or use the "
                "model's own join()"
            )
        return self.process_group

    def _notify(self) -> None:
        """Inside a Join: tell it that this rank trains. Collective."""
        if notified := Join.notify_join_context(self):
            notified.wait()


class Shadow(JoinHook):
    """On a rank without inputs Join calls `step` for each of the others' iterations, then `end`."""

    def __init__(self, step: Call, end: Call = lambda: None) -> None:
        self.step, self.end = step, end

    def main_hook(self) -> None:
        self.step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.end()
