"""Virtual ranks: runs a whole collective over peer memory on one GPU, in one process.

One cooperative launch has a block for every (channel, rank): blocks wait for one another, so all
are resident or the launch is refused. The results equal the simulator's bit for bit. The transport
runs one rank per process; the kernel does not know the difference, so tests and `bench.gpu` need
one GPU only, and on the host no processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringdp.errors import CollectiveMismatch, CollectiveTimeout, CommunicationError, UsageError
from ringdp.schedule.program import Program
from ringdp.transport.base import DTYPES, REDUCE_OPS, ReduceOp
from ringdp.transport.bounds import chunk_bounds
from ringdp.transport.peer import jobs
from ringdp.transport.peer.jobs import SLAB, Fault, Job, Shape, kernel_name
from ringdp.transport.peer.kernels import CudaKernels, Kernels, Launch, resident, resolve

WORTH = 64 << 10  # bytes of a buffer that justify a channel; a slab if that is less


class VirtualRanks:
    """Ranks of one launch, each a row of blocks, over windows of one Shape."""

    def __init__(
        self,
        ranks: int,
        *,
        channels: int | None = None,
        depth: int = 4,
        slab: int = SLAB,
        timeout: float = 10.0,
        device: torch.device | str = "cuda",
        kernels: Kernels | None = None,
    ) -> None:
        """`channels`: blocks per rank, by default the GPU's resident blocks divided by `ranks`.

        `timeout`: seconds that a rank waits for another. `device`: a GPU, by default the one that
        is torch's current device now. `kernels`: by default the fatbin's.

        Raises UsageError if there is no GPU, or a size is impossible.
        """
        Shape(ranks, 1, depth, slab).check()
        self._kernels = CudaKernels(device) if kernels is None else kernels
        self._device = resolve(device)
        if channels is None:
            channels = max(1, resident(self._device) // ranks)
        self._shape, self._timeout, self._number = Shape(ranks, channels, depth, slab), timeout, 0
        self._windows = self._zeros(ranks, self._shape.window, dtype=torch.uint8)
        self._counts = self._zeros(ranks, *self._shape.counts)
        self._failures = self._zeros(ranks)
        self._table = torch.tensor([w.data_ptr() for w in self._windows], device=self._device)
        self._rows: WeakKeyDictionary[Program, Tensor] = WeakKeyDictionary()

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def run(
        self, programs: Sequence[Program], buffers: Sequence[Tensor], op: ReduceOp = "sum"
    ) -> None:
        """Run one program per rank on one flat buffer per rank, in place, and wait for the end.

        Raises UsageError if the buffers do not match, CollectiveTimeout if a message did not arrive
        in time, CollectiveMismatch if it belonged to another launch or had another length. After
        either of the last two the object is unusable.
        """
        dtype = self._check(programs, buffers)
        bounds = [chunk_bounds(b.numel(), p) for b, p in zip(buffers, programs, strict=True)]
        largest = max(b.nbytes for b in buffers)
        ranks, channels, _, slab = self._shape
        active = max(1, min(channels, largest // min(WORTH, slab)))
        shared = max(map(jobs.shared_bytes, programs))
        self._number += 1
        # One upload: the jobs, followed by their bounds.
        size = ranks * len(Job._fields)
        table = self._room(8 * (size + sum(map(len, bounds)))).view(torch.int64)
        begins = accumulate(map(len, bounds), initial=size)
        rooms = [self._room(jobs.room_bytes(p, self._shape, active, dtype)) for p in programs]
        each = zip(range(ranks), programs, buffers, rooms, begins, strict=False)
        made = [
            Job(
                rank,
                *self._shape,
                active=active,
                number=self._number,
                timeout=int(self._timeout * 1e9),
                op=REDUCE_OPS.index(op),
                rows=self._rows_of(program).data_ptr(),
                length=len(program.rows),
                bounds=table[begin:].data_ptr(),
                chunks=program.chunks,
                scratch=program.scratch,
                buffer=buffer.data_ptr(),
                room=room.data_ptr(),
                counts=self._counts[rank].data_ptr(),
                failure=self._failures[rank].data_ptr(),
                windows=self._table.data_ptr(),
            )
            for rank, program, buffer, room, begin in each
        ]
        table.copy_(torch.tensor([*chain.from_iterable(made), *chain.from_iterable(bounds)]))
        there = table[:size].view(ranks, -1)
        self._kernels.launch(Launch(kernel_name(dtype), (active, ranks), there, shared))
        self._raise_failure()

    def _rows_of(self, program: Program) -> Tensor:
        if program not in self._rows:
            self._rows[program] = jobs.rows_of(program).to(self._device)
        return self._rows[program]

    def _check(self, programs: Sequence[Program], buffers: Sequence[Tensor]) -> torch.dtype:
        ranks = self._shape.ranks
        if not len(programs) == len(buffers) == ranks:
            raise UsageError(
                f"{ranks} ranks take as many programs and buffers, not {len(programs)} and "
                f"{len(buffers)}"
            )
        for rank, buffer in enumerate(buffers):
            if buffer.dtype not in DTYPES or buffer.dtype != buffers[0].dtype:
                raise UsageError(f"buffer {rank} is {buffer.dtype}; rank 0's is {buffers[0].dtype}")
            if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device != self._device:
                raise UsageError(
                    f"buffers are flat, contiguous and on {self._device}; that of rank {rank} is "
                    f"{list(buffer.shape)} with strides {buffer.stride()} on {buffer.device}"
                )
        return buffers[0].dtype

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
