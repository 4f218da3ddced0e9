"""Kernels that run programs over peer memory: on a GPU, or from the same source as host threads.

The GPU kernels are precompiled (`peer.fatbin`, built if nvcc is found) and loaded by CuPy, so the
user needs no compiler. A launch is cooperative: all its blocks are resident, or it is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringdp import _core
from ringdp.errors import CommunicationError, UsageError
from ringdp.transport.base import DTYPES
from ringdp.transport.device.streams import advice_to_install
from ringdp.transport.peer.jobs import kernel_name

FATBIN = Path(_core.__file__).parent / "peer.fatbin"
HOST = Path(_core.__file__).with_name("libhostpeer.so")
THREADS = 512  # per block
TOGETHER = 1  # blocks per multiprocessor, limited by registers (launch bounds in csrc's peer.cu)
NO_THREADS = 3  # result of csrc's threads.hpp: the system lacks threads


class Launch(NamedTuple):
    """A kernel launch: one block per element of `grid`, with `shared` bytes of shared memory each.

    `jobs`: int64[ranks, fields of Job] on the device. `buffer`, `room` and `number`, if not 0,
    replace those of a single job.
    """

    kernel: str
    grid: tuple[int, int]
    jobs: Tensor
    shared: int
    buffer: int = 0
    room: int = 0
    number: int = 0


class Kernels(Protocol):
    def launch(self, launch: Launch) -> None:
        """Start the launch."""
        ...


class CudaKernels:
    """The fatbin's kernels, launched on torch's current stream of the GPU that holds the jobs."""

    def __init__(self, device: torch.device) -> None:
        """Load the kernels on `device`.

        Raises UsageError, with what to do, if CuPy or a compatible fatbin is missing.
        """
        try:
            import cupy
        except ImportError as e:
            raise UsageError(
                f"peer memory needs CuPy to load its kernels ({e}): {advice_to_install()}"
            ) from e
        if not FATBIN.exists():
            raise UsageError(
                f"{FATBIN} does not exist: ringdp was built without nvcc. Build it where there is "
                "one (pip install . finds it on PATH, in CUDA_HOME or in /usr/local/cuda)"
            )
        self._cupy = cupy
        module = cupy.RawModule(path=str(FATBIN), enable_cooperative_groups=True)
        try:
            with on(cupy, device):
                # Load all of them now: loading one while another spins would never end. Keep them,
                # as CuPy's module queries the driver on each lookup.
                names = map(kernel_name, DTYPES)
                self._kernels: dict[str, Any] = {name: module.get_function(name) for name in names}
        except cupy.cuda.driver.CUDADriverError as e:
            raise UsageError(
                f"the driver of {device} does not take {FATBIN}: {e}. It holds code for sm_80 and "
                "later, of the nvcc that ringdp was built with: update the driver, or install "
                "ringdp again with an nvcc that is no newer than it"
            ) from e

    def launch(self, launch: Launch) -> None:
        """Start the launch.

        Raises CommunicationError if the driver or CuPy refuses it. CuPy asks the driver how many
        blocks can be resident, and clamps the grid's first dimension to that many: so it is 1 here.
        """
        name, grid, jobs, shared, *others = launch
        try:
            with (
                on(self._cupy, jobs.device),
                self._cupy.cuda.Stream.from_external(torch.cuda.current_stream()),
            ):
                at = jobs.data_ptr()
                self._kernels[name]((1, *grid), (THREADS,), (at, *others), shared_mem=shared)
        except (self._cupy.cuda.driver.CUDADriverError, ValueError) as e:
            raise CommunicationError(
                f"the driver of {jobs.device} refused {grid[0]} channels of {grid[1]} ranks, a "
                f"block of {THREADS} threads for each, of kernel {name}: {e}. All blocks must run "
                "at once: take fewer channels if they are too many"
            ) from e


@contextmanager
def on(cupy: Any, device: torch.device) -> Iterator[None]:
    """Make `device` current for torch and for CuPy, which keeps a module for each device."""
    with torch.cuda.device(device), cupy.cuda.Device(device.index):
        yield


def resident(device: torch.device) -> int:
    """The blocks that a GPU, or the part of one that this process has, runs at once."""
    return TOGETHER * torch.cuda.get_device_properties(device).multi_processor_count


class HostKernels:
    """The kernels compiled for the CPU. A launch returns when all its threads have ended."""

    def __init__(self) -> None:
        """Raises UsageError if this build of ringdp has no such library."""
        try:
            self._library = ctypes.CDLL(str(HOST))
        except OSError as e:
            raise UsageError(f"this build of ringdp has no kernels for the host: {e}") from e

    def launch(self, launch: Launch) -> None:
        """Run the launch. Raises CommunicationError if the system lacks threads for it."""
        name, grid, jobs, shared, *addresses, number = launch
        at = map(ctypes.c_void_p, (jobs.data_ptr(), *addresses))
        key = ctypes.c_int64(number)
        refused = self._library.launch(name.encode(), *grid, *at, key, shared)
        if refused == NO_THREADS:
            raise CommunicationError(
                f"the system lacks threads, or memory, for {grid[0]} channels of {grid[1]} ranks"
            )
        assert not refused, f"{name} with {shared} bytes a block: {refused}"


@cache
def kernels_on(device: torch.device) -> Kernels:
    """The kernels for `device`, loaded once per process. Raises UsageError if they cannot be."""
    return HostKernels() if device.type == "cpu" else CudaKernels(device)
