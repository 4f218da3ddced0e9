"""Training on inputs of unequal length: a rank that has none left shadows the others' collectives.

    a rank trains     and says so before each forward, with what it is about to do: its Status
    it has no more    it answers every forward of the others with zeros
    nobody trains     all take the parameters and buffers of a rank that ended last

Collectives of the model itself, such as SyncBatchNorm's, are not shadowed.

`ddp.join()` does all of it over ringdp. torch's `Join([ddp, optimizer])` counts those that train
over the torch.distributed group, and asks each of its joinables to shadow one iteration: `join`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ringdp.comm import Communicator
from ringdp.errors import ModelError


class Status(NamedTuple):
    """What a rank is about to do; each 1 or 0. `waits`: a forward before has begun reductions that
    no backward has done yet, nor will this one's begin others."""

    trains: int = 0
    reduces: int = 0
    broadcasts: int = 0
    waits: int = 0


class Uneven:
    """While inside `ddp.join()`, or torch's Join. `initial_size`: gradients are divided by the
    number of all ranks, also once some have ended; else by the number of those that train."""

    def __init__(self, comm: Communicator, *, initial_size: bool, throw: bool) -> None:
        self.comm, self.initial_size, self.throw = comm, initial_size, throw
        self.divisor = comm.size  # in this iteration
        self.root = 0  # the last of the ranks that train, or trained last

    def exchange(self, mine: Status) -> Status:
        """The root's status. Collective: 32 bytes from every rank.

        Raises ModelError where it was asked to once a rank has ended.
        """
        rows = torch.empty(self.comm.size * len(mine), dtype=torch.int64)
        self.comm.all_gather(rows, torch.tensor(mine))
        found = [Status(*row) for row in rows.view(self.comm.size, -1).tolist()]
        training = [rank for rank, status in enumerate(found) if status.trains]
        if self.throw and 0 < len(training) < self.comm.size:
            ended = [rank for rank, status in enumerate(found) if not status.trains]
            if not mine.trains:
                raise ModelError(f"Rank {self.comm.rank} exhausted all inputs, as did: {ended}")
            raise ModelError(f"Detected at least one rank that exhausted inputs: {ended}")
        self.root = max(training, default=self.root)
        self.divisor = self.comm.size if self.initial_size else max(len(training), 1)
        return found[self.root]

    def shadow(self, step: Callable[[Status], None]) -> None:
        """Do `step` for each forward of the others, until all have ended. Collective."""
        while (status := self.exchange(Status())).trains:
            step(status)
