"""Virtual ranks: runs a whole collective over peer memory on one GPU, in one process.

One cooperative launch has a block for every (channel, rank): blocks wait for one another, so all
are resident or the launch is refused. The results equal the simulator's bit for bit. The transport
runs one rank per process; the kernel does not know the difference, so tests and `bench.gpu` need
one GPU only, and on the host no processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringdp.errors import CollectiveMismatch, CollectiveTimeout, CommunicationError
from ringdp.schedule.program import Program
from ringdp.transport.base import ReduceOp
from ringdp.transport.bounds import chunk_bounds
from ringdp.transport.peer import jobs
from ringdp.transport.peer.jobs import SLAB, Fault, Job, Shape, kernel_name
from ringdp.transport.peer.kernels import Kernels, Launch, resident

WORTH = 64 << 10  # bytes of a buffer that justify a channel; a slab if that is less


class VirtualRanks:
    """Ranks of one launch, each a row of blocks, over windows of one Shape."""

    def __init__(
        self,
        ranks: int,
        *,
        kernels: Kernels,
        device: torch.device | str = "cuda",
        channels: int | None = None,
        depth: int = 4,
        slab: int = SLAB,
        timeout: float = 10.0,
    ) -> None:
        """`channels`: blocks per rank, by default the GPU's resident blocks divided by `ranks`.

        `timeout`: seconds that a rank waits for another.
        """
        self._kernels, self._device = kernels, torch.device(device)
        if channels is None:
            channels = max(1, resident(self._device) // ranks)
        self._shape, self._timeout, self._number = Shape(ranks, channels, depth, slab), timeout, 0
        self._windows = self._zeros(ranks, self._shape.window, dtype=torch.uint8)
        self._counts = self._zeros(ranks, *self._shape.counts)
        self._failures = self._zeros(ranks)
        self._table = torch.tensor([w.data_ptr() for w in self._windows], device=self._device)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def run(
        self, programs: Sequence[Program], buffers: Sequence[Tensor], op: ReduceOp = "sum"
    ) -> None:
        """Run one program per rank on one flat buffer per rank, in place, and wait for the end.

        Raises CollectiveTimeout if a message did not arrive in time, CollectiveMismatch if it
        belonged to another launch or had another length. Then the object is unusable.
        """
        dtype, largest = buffers[0].dtype, max(b.nbytes for b in buffers)
        ranks, channels, _, slab = self._shape
        active = max(1, min(channels, largest // min(WORTH, slab)))
        self._number += 1
        kept, made = list[Tensor](), list[Job]()
        for program, buffer in zip(programs, buffers, strict=True):
            bounds = chunk_bounds(buffer.numel(), program)
            tables = jobs.tables_of(program, bounds).to(self._device)
            size = jobs.room_bytes(program, self._shape, active, dtype)
            room = torch.empty(size, dtype=torch.uint8, device=self._device)
            kept += [tables, room]
            job = jobs.job_of(
                program,
                tables,
                self._shape,
                op,
                active=active,
                timeout=self._timeout,
                counts=self._counts[program.rank],
                failure=self._failures[program.rank],
                windows=self._table,
                number=self._number,
                buffer=buffer.data_ptr(),
                room=room.data_ptr(),
            )
            made.append(job)
        there = torch.tensor(made, device=self._device)
        shared = max(map(jobs.shared_bytes, programs))
        self._kernels.launch(Launch(kernel_name(dtype), (active, ranks), there, shared))
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Wait for the launch to end, and raise its failure, if any."""
        found = [(rank, word) for rank, word in enumerate(self._failures.tolist()) if word]
        if not found:
            return
        # A rank that was stopped knows less than the rank that stopped it.
        faults = [(rank, jobs.decoded(word)) for rank, word in found]
        rank, (fault, peer, channel, turn) = min(faults, key=lambda f: f[1].fault == Fault.STOPPED)
        where = f"in round {turn}, channel {channel}, of launch {self._number}"
        if fault == Fault.TIMEOUT:
            raise CollectiveTimeout(
                f"rank {rank} waited longer than {self._timeout:g} s for rank {peer} {where}"
            )
        if fault == Fault.MISMATCH:
            raise CollectiveMismatch(
                f"rank {rank} got from rank {peer} a message of another launch or length {where}"
            )
        raise CommunicationError(f"rank {rank} was stopped by rank {peer} {where}")
