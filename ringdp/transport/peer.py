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

from collections.abc import Sequence
from enum import IntEnum
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
THREADS = 512  # of a block
MOST_BLOCKS = 96  # of a launch, unless told: an A100 runs 108 of them at once
LINE = 128  # bytes between what different ranks write (csrc's kLine)
LEADER = 256  # bytes of shared memory that do not depend on the program (csrc's kLeader)
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
    """The fatbin's, on torch's current stream."""

    def __init__(self) -> None:
        """Raises UsageError, with what to do, where CuPy, a GPU or the fatbin is missing."""
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
        for dtype in DTYPES:  # loading one while another spins would never end
            self._module.get_function(kernel_name(dtype))

    def launch(self, name: str, grid: tuple[int, int], jobs: Tensor, shared: int) -> None:
        kernel = self._module.get_function(name)
        with self._cupy.cuda.Stream.from_external(_Current()):
            kernel(grid, (THREADS,), (jobs.data_ptr(),), shared_mem=shared)


class _Current:
    """torch's current stream, by CUDA's stream protocol, which its class has from 2.10 on."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


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
        slab: int = 64 << 10,
        timeout: float = 10.0,
        device: str = "cuda",
        kernels: Kernels | None = None,
    ) -> None:
        """`channels`: blocks of a rank. `timeout`: seconds that a rank waits for another.

        `kernels`: by default the fatbin's. Raises UsageError where there is no GPU, or a size is
        not possible.
        """
        if ranks < 1 or slab < LINE or slab % LINE or depth < 1:
            raise UsageError(
                f"ranks and depth are at least 1 and slab a multiple of {LINE} bytes, not {ranks}, "
                f"{depth} and {slab}"
            )
        self._kernels = CudaKernels() if kernels is None else kernels
        self._channels = max(1, min(32, MOST_BLOCKS // ranks)) if channels is None else channels
        self._ranks, self._depth, self._slab = ranks, depth, slab
        self._timeout, self._device, self._number = timeout, device, 0
        places = self._channels * ranks
        window = LINE * (1 + 2 * places) + places * depth * (LINE + slab)
        self._windows = self._zeros(ranks, window, dtype=torch.uint8)
        self._counts = self._zeros(ranks, places, 2)
        self._failures = self._zeros(ranks)
        self._table = torch.tensor([w.data_ptr() for w in self._windows], device=device)
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
        active = max(1, min(self._channels, max(b.nbytes for b in buffers) // self._slab))
        self._number += 1
        kept: list[Tensor] = []
        jobs = [
            self._job(rank, program, buffers[rank], bounds[rank], OPS.index(op), active, kept)
            for rank, program in enumerate(programs)
        ]
        shared = max(_shared_bytes(p) for p in programs)
        if shared > SHARED:
            raise UsageError(
                f"the programs need {shared} bytes of shared memory, more than {SHARED}"
            )
        table = torch.tensor(jobs, device=self._device)
        self._kernels.launch(kernel_name(dtype), (active, self._ranks), table, shared)
        self._raise_failure()

    def _job(
        self,
        rank: int,
        program: Program,
        buffer: Tensor,
        bounds: Sequence[int],
        op: int,
        active: int,
        kept: list[Tensor],
    ) -> Job:
        if program not in self._rows:
            self._rows[program] = torch.from_numpy(program.rows.copy()).to(self._device)
        cuts = torch.tensor(bounds, dtype=torch.int64, device=self._device)
        chunks = program.chunks + program.scratch
        spare = self._room(active * program.scratch * self._slab)
        # a float32 for each 16-bit element of a slab
        wide = chunks if buffer.dtype in WIDE else 0
        sums = self._room(active * wide * self._slab * 2)
        kept += [cuts, spare, sums]
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
            bounds=cuts.data_ptr(),
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
        here = torch.device(self._device).type
        for rank, buffer in enumerate(buffers):
            if buffer.dtype not in DTYPES or buffer.dtype != buffers[0].dtype:
                raise UsageError(f"buffer {rank} is {buffer.dtype}; rank 0's is {buffers[0].dtype}")
            if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device.type != here:
                raise UsageError(
                    f"buffers are flat, contiguous and on {here}; that of rank {rank} is "
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
    return LEADER + 9 * program.scratch + len(program.rows) + program.chunks
