"""A contender that measures how fast the machine's cores copy and read, for `bound`.

Its ranks share a file in memory: a page of flags for the barrier, then a buffer per rank. They
inherit its descriptor, whose number the controller puts into FILE_VARIABLE.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ringdp.cli.bench.cases import Task, torch_dtype
from ringdp.cli.bench.contender import Buffers, Contender

FILE_VARIABLE = "RINGDP_PROBE_FILE"
LINE = 8  # int64s between the flags of two ranks


class Probe(Contender):
    version = "copies and reads of this machine"

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._shared = mmap.mmap(int(os.environ[FILE_VARIABLE]), 0)
        self._flags = np.frombuffer(self._shared, np.int64, self.ranks * LINE)[::LINE]
        self._passed = 0

    def input(self, task: Task, count: int) -> torch.Tensor:
        return self._part(task, self.rank)

    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        peer = self._part(task, (self.rank + 1) % self.ranks)
        match task.collective:
            case "fold":
                mine, theirs = (
                    t.tensor_split(self.ranks)[self.rank].numpy() for t in (buffers.input, peer)
                )
                return partial(np.add, mine, theirs, out=mine)
            case "read":
                return partial(torch.sum, peer)
            case "pull":
                return partial(np.copyto, buffers.output.numpy(), peer.numpy())
        return partial(np.copyto, buffers.output.numpy(), buffers.input.numpy())

    def barrier(self) -> None:
        """Spin: this contender never has more ranks than cores."""
        self._passed += 1
        self._flags[self.rank] = self._passed
        while (self._flags < self._passed).any():
            pass

    def close(self) -> None:
        """Leave the mapping, into which tensors still point, to the end of the process."""

    def _part(self, task: Task, rank: int) -> torch.Tensor:
        dtype = torch_dtype(task.dtype)
        room = (len(self._shared) - mmap.PAGESIZE) // self.ranks
        offset = mmap.PAGESIZE + rank * room
        return torch.frombuffer(self._shared, dtype=dtype, count=task.count, offset=offset)


def shared_file(ranks: int, size: int) -> int:
    """Create a file with `size` bytes, a whole number of pages, per rank; return its descriptor."""
    descriptor = os.memfd_create("ringdp-probe")
    os.ftruncate(descriptor, mmap.PAGESIZE + ranks * size)
    return descriptor
