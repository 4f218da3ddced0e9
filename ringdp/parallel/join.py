"""What torch's Join asks of DistributedDataParallel and of ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import group
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ringdp.comm import Communicator
from ringdp.errors import UsageError

Call = Callable[[], object]


class Joins(Joinable):
    """One that can shadow. Join counts who trains over a torch.distributed group."""

    comm: Communicator
    _group: Any  # as given
    _advice: str  # what to give in a communicator's place

    @property
    def process_group(self) -> Any:
        """As given; else torch's default group, where there is one, or the communicator."""
        return self._group or group.WORLD or self.comm

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        if isinstance(self.process_group, Communicator):
            raise UsageError(
                f"process_group is {self.process_group!r}; torch's Join counts ranks over a "
                f"torch.distributed group: give {self._advice}"
            )
        return self.process_group

    def _notify(self) -> None:
        """Tell Join, if within one, that this rank trains. Collective."""
        if notified := Join.notify_join_context(self):
            notified.wait()


class Shadow(JoinHook):
    """What Join calls on a rank without inputs: `step` with each of the others, then `end`."""

    def __init__(self, step: Call, end: Call = lambda: None) -> None:
        self.step, self.end = step, end

    def main_hook(self) -> None:
        self.step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.end()
