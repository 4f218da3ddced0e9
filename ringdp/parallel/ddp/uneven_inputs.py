"""Ranks with unequal numbers of batches: one that has run out shadows the others' collectives.

    before each forward     every rank sends its Status: what it is about to do
    a rank has run out      it takes part in the others' reductions with zeros
    all ranks have run out  all take the parameters and buffers of a rank that trained last

Collectives inside the model, such as SyncBatchNorm's, are not shadowed.

`ddp.join()` does this over ringdp alone. torch's `Join([ddp, optimizer])` counts the training ranks
over its torch.distributed group, and asks each joinable to shadow one iteration (see `module`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringdp.comm import Communicator
from ringdp.errors import ModelError


class Status(NamedTuple):
    """What a rank is about to do; each field is 1 or 0.

    `waits`: an earlier forward's backward is still to come, so this one starts no reductions.
    """

    trains: int = 0
    reduces: int = 0
    broadcasts: int = 0
    waits: int = 0


class UnevenInputs:
    """State of one `ddp.join()` or torch Join. `initial_size`: divide gradients by the number of
    all ranks, even after some have run out; otherwise by the number that still train."""

    def __init__(self, comm: Communicator, *, initial_size: bool, throw: bool) -> None:
        self.comm, self.initial_size, self.throw = comm, initial_size, throw
        self.divisor = comm.size  # of the gradients of this iteration
        self.root = 0  # the highest rank that trains, or trained last

    def exchange(self, mine: Status) -> Status:
        """Exchange statuses; returns the root's. Collective: 32 bytes from every rank.

        With `throw`, raises ModelError on every rank once one has run out.
        """
        rows = torch.empty(self.comm.size * len(mine), dtype=torch.int64, device="cpu")
        self.comm.all_gather(rows, torch.tensor(mine, device="cpu"))
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
