"""csrc/cuda's kernels, compiled by g++ to run as threads: see peer_in_threads.cpp."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import torch

from ringdp.transport.peer import FATBIN, CudaKernels
from tests.builds import Build

SOURCE, EXACT = "transport/peer_in_threads.cpp", "-ffp-contract=off"
LIBRARY = Build(SOURCE, (EXACT, "-O1", "-shared", "-fPIC"))


class HostKernels:
    """In place of CudaKernels: launches on the CPU, and returns when all threads have ended."""

    def __init__(self, library: Path) -> None:
        """`library`: of LIBRARY."""
        self._library = ctypes.CDLL(str(library))

    def launch(self, name: str, grid: tuple[int, int], jobs: torch.Tensor, shared: int) -> None:
        table = ctypes.c_void_p(jobs.data_ptr())
        assert self._library.launch(name.encode(), *grid, table, shared) == 0


class WithoutRank:
    """Kernels whose launches leave out rank 0: for the others it is dead."""

    def __init__(self, kernels: HostKernels | CudaKernels) -> None:
        self._kernels = kernels

    def launch(self, name: str, grid: tuple[int, int], jobs: torch.Tensor, shared: int) -> None:
        self._kernels.launch(name, (grid[0], grid[1] - 1), jobs[1:].contiguous(), shared)


def missing() -> str:
    """What the true kernels lack here to run; empty if nothing."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if not FATBIN.exists():
        return "there is a CUDA device but no fatbin: was there no nvcc, or did it fail?"
    return "" if find_spec("cupy") else "there is a CUDA device but no CuPy"
