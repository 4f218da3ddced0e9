"""Programs run by a CUDA kernel over memory that the ranks' GPUs can reach.

csrc/cuda's kernel interprets the rows itself: a block for every channel waits for flags in its own
memory, moves data by 16 bytes a thread, and writes to its peers' windows. A launch is all that the
host does. Here all ranks are virtual, on one GPU: one cooperative launch has a block for every
(channel, rank), so blocks that wait for one another all run, or the launch is refused. That is how
the protocol is tested and timed where there is one GPU; the results are the simulator's to the bit.

The kernels come compiled (`peer.fatbin`, built where there is an nvcc) and are loaded by CuPy, so
the user needs no compiler. Leaves out: ranks in processes of their own, whose windows would be
mapped by CUDA IPC; the kernel does not know the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringdp import _core
from ringdp.errors import CollectiveMismatch, CollectiveTimeout, CommunicationError, UsageError
from ringdp.schedule.program import Program
from ringdp.transport.base import DTYPES, OPS, Op, chunk_bounds

FATBIN = Path(_core.__file__).parent / "peer.fatbin"
THREADS = 256  # of a block
TOGETHER = 2  # blocks of a multiprocessor, by their registers (the bounds in csrc's peer.cu)
LINE = 128  # bytes between what different ranks write (csrc's kLine)
# A slab costs its leader the same trips to memory whatever its size, so slabs are large: the
# largest power of two of which one for every block of a launch, written and soon read, fits the
# second-level cache. That is by data sheet 40 MB for 2 · 108 blocks on an A100, 50 MB for 2 · 132
# on an H100.
SLAB = 128 << 10
WORTH = 64 << 10  # bytes of a buffer that are worth a channel; a slab if that is less
LEADER = 512  # bytes of shared memory that do not depend on the program (csrc's kLeader)
SHARED = 48 << 10  # bytes of shared memory that a block may have without asking
WIDE = (torch.float16, torch.bfloat16)  # summed in float32


class Fault(IntEnum):
    """csrc's enum Fault."""

    NONE = 0
    TIMEOUT = 1
    MISMATCH = 2
    STOPPED = 3  # a peer failed first


class Job(NamedTuple):
    """One rank's part of a launch: csrc's struct Job, 8 bytes a field. Addresses are on the GPU."""

    rank: int
    ranks: int
    channels: int
    depth: int
    slab: int  # bytes
    active: int  # channels of this launch
    number: int
    timeout: int  # ns
    op: int
    rows: int
    length: int  # rows
    bounds: int
    chunks: int
    scratch: int
    buffer: int
    spare: int
    sums: int
    counts: int
    failure: int
    windows: int


class Kernels(Protocol):
    def launch(self, name: str, grid: tuple[int, int], jobs: Tensor, shared: int) -> None:
        """Start kernel `name`, a block for each of `grid`, with `shared` bytes of memory a block.

        `jobs`: int64[ranks, fields of Job] on the device.
        """
        ...


class CudaKernels:
    """The fatbin's, on torch's current stream of the GPU on which the jobs are."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        """`device`: whose driver loads them now.

        Raises UsageError, with what to do, where CuPy, a GPU or a fatbin that fits is missing.
        """
        if not torch.cuda.is_available():
            raise UsageError(
                "peer memory needs a CUDA GPU, and torch finds none here; shm serves the CPU"
            )
        try:
            import cupy
        except ImportError as e:
            raise UsageError(
                "peer memory needs CuPy to load its kernels: pip install 'ringdp[cuda13]', or "
                f"cuda12 ({e})"
            ) from e
        if not FATBIN.exists():
            raise UsageError(
                f"{FATBIN} does not exist: ringdp was built without nvcc. Build it where there is "
                "one (pip install . finds it on PATH, in CUDA_HOME or in /usr/local/cuda)"
            )
        self._cupy = cupy
        self._module: Any = cupy.RawModule(path=str(FATBIN), enable_cooperative_groups=True)
        try:
            with self._on(resolve(device)):
                for dtype in DTYPES:  # loading one while another spins would never end
                    self._module.get_function(kernel_name(dtype))
        except cupy.cuda.driver.CUDADriverError as e:
            raise UsageError(
                f"the driver of {device} does not take {FATBIN}: {e}. It holds code for sm_80 and "
                "later, of the nvcc that ringdp was built with: update the driver, or install "
                "ringdp again with an nvcc that is no newer than it"
            ) from e

    def launch(self, name: str, grid: tuple[int, int], jobs: Tensor, shared: int) -> None:
        """Raises CommunicationError where the driver refuses."""
        try:
            with self._on(jobs.device), self._cupy.cuda.Stream.from_external(_Current()):
                kernel = self._module.get_function(name)
                kernel(grid, (THREADS,), (jobs.data_ptr(),), shared_mem=shared)
        except self._cupy.cuda.driver.CUDADriverError as e:
            raise CommunicationError(
                f"the driver of {jobs.device} refused {grid[0]} channels of {grid[1]} ranks, a "
                f"block of {THREADS} threads for each, of kernel {name}: {e}. All blocks must run "
                "at once: take fewer channels if they are too many"
            ) from e

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        """Current for torch, and for CuPy, which keeps a module for each device."""
        with torch.cuda.device(device), self._cupy.cuda.Device(device.index):
            yield


class _Current:
    """torch's current stream, by CUDA's stream protocol, which its class has from 2.10 on."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


def resolve(device: torch.device | str) -> torch.device:
    """With the number of the GPU, so that it stays the same one."""
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def kernel_name(dtype: torch.dtype) -> str:
    return "rows_" + str(dtype).removeprefix("torch.")


class VirtualRanks:
    """Several ranks on one GPU, in one process, each a row of blocks in one launch.

    Every block has `depth` slots of `slab` bytes for what each other rank sends it: a program must
    need no more (`schedule.fifo_depth`).
    """

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
        """`channels`: blocks of a rank, by default what the GPU runs at once over the ranks.

        `timeout`: seconds that a rank waits for another. `device`: a GPU, by default torch's
        current one, and for good.

        `kernels`: by default the fatbin's. Raises UsageError where there is no GPU, or a size is
        not possible.
        """
        if ranks < 1 or slab < LINE or slab % LINE or depth < 1:
            raise UsageError(
                f"ranks and depth are at least 1 and slab a multiple of {LINE} bytes, not {ranks}, "
                f"{depth} and {slab}"
            )
        self._kernels = CudaKernels(device) if kernels is None else kernels
        self._device = resolve(device)
        if channels is None:
            multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count
            channels = max(1, TOGETHER * multiprocessors // ranks)
        self._ranks, self._channels, self._depth, self._slab = ranks, channels, depth, slab
        self._timeout, self._number = timeout, 0
        places = self._channels * ranks
        window = LINE * (1 + 2 * places) + places * depth * (LINE + slab)
        self._windows = self._zeros(ranks, window, dtype=torch.uint8)
        self._counts = self._zeros(ranks, places, 2)
        self._failures = self._zeros(ranks)
        self._table = torch.tensor([w.data_ptr() for w in self._windows], device=self._device)
        self._rows: WeakKeyDictionary[Program, Tensor] = WeakKeyDictionary()

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def run(
        self,
        programs: Sequence[Program],
        buffers: Sequence[Tensor],
        op: Op = "sum",
        *,
        bounds: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Run one program per rank on one flat buffer per rank, in place, and wait for the end.

        `bounds` are each rank's chunk boundaries, by default those of `chunk_bounds`. Raises
        UsageError for buffers that are not alike, CollectiveTimeout where a message did not come in
        time, CollectiveMismatch where it was of another length; after either the object is of no
        use any more.
        """
        dtype = self._check(programs, buffers)
        if bounds is None:
            bounds = [chunk_bounds(b.numel(), p) for b, p in zip(buffers, programs, strict=True)]
        largest = max(b.nbytes for b in buffers)
        active = max(1, min(self._channels, largest // min(WORTH, self._slab)))
        self._number += 1
        shared = max(_shared_bytes(p) for p in programs)
        if shared > SHARED:
            raise UsageError(
                f"the programs need {shared} bytes of shared memory, more than {SHARED}"
            )
        # One upload: the jobs, and behind them their bounds.
        size = self._ranks * len(Job._fields)
        table = self._room(8 * (size + sum(map(len, bounds)))).view(torch.int64)
        begins = accumulate(map(len, bounds), initial=size)
        kept: list[Tensor] = []
        jobs = [
            self._job(
                rank, programs[rank], buffers[rank], table[begin:], OPS.index(op), active, kept
            )
            for rank, begin in zip(range(self._ranks), begins, strict=False)
        ]
        table.copy_(torch.tensor([*chain.from_iterable(jobs), *chain.from_iterable(bounds)]))
        there = table[:size].view(self._ranks, -1)
        self._kernels.launch(kernel_name(dtype), (active, self._ranks), there, shared)
        self._raise_failure()

    def _job(
        self,
        rank: int,
        program: Program,
        buffer: Tensor,
        bounds: Tensor,
        op: int,
        active: int,
        kept: list[Tensor],
    ) -> Job:
        if program not in self._rows:
            self._rows[program] = torch.from_numpy(program.rows.copy()).to(self._device)
        chunks = program.chunks + program.scratch
        spare = self._room(active * program.scratch * self._slab)
        # a float32 for each 16-bit element of a slab
        wide = chunks if buffer.dtype in WIDE else 0
        sums = self._room(active * wide * self._slab * 2)
        kept += [spare, sums]
        return Job(
            rank=rank,
            ranks=self._ranks,
            channels=self._channels,
            depth=self._depth,
            slab=self._slab,
            active=active,
            number=self._number,
            timeout=int(self._timeout * 1e9),
            op=op,
            rows=self._rows[program].data_ptr(),
            length=len(program.rows),
            bounds=bounds.data_ptr(),
            chunks=program.chunks,
            scratch=program.scratch,
            buffer=buffer.data_ptr(),
            spare=spare.data_ptr(),
            sums=sums.data_ptr(),
            counts=self._counts[rank].data_ptr(),
            failure=self._failures[rank].data_ptr(),
            windows=self._table.data_ptr(),
        )

    def _check(self, programs: Sequence[Program], buffers: Sequence[Tensor]) -> torch.dtype:
        if not len(programs) == len(buffers) == self._ranks:
            raise UsageError(
                f"{self._ranks} ranks take as many programs and buffers, not {len(programs)} and "
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
        """Also waits for the launch to end."""
        found = [(rank, word) for rank, word in enumerate(self._failures.tolist()) if word]
        if not found:
            return
        # Those who were stopped know less than who stopped them.
        rank, word = min(found, key=lambda item: item[1] & 0xFFFF == Fault.STOPPED)
        fault, peer, channel, turn = (word >> shift & 0xFFFF for shift in (0, 16, 32, 48))
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


def _shared_bytes(program: Program) -> int:
    """csrc's shared_bytes."""
    ranks, rows, chunks = program.ranks, len(program.rows), program.chunks
    return LEADER + 24 * ranks + 8 * (chunks + 1) + 25 * rows + 9 * program.scratch + chunks
