"""Shared by the tests of the peer-memory kernels."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ringdp.transport.peer.kernels import FATBIN, Kernels, Launch

SOURCE, EXACT = "transport/peer_in_threads.cpp", "-ffp-contract=off"


class WithoutRank:
    """Kernels whose launches omit rank 0, which then looks dead to the others."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def launch(self, launch: Launch) -> None:
        (channels, ranks), others = launch.grid, launch.jobs[1:].contiguous()
        self._kernels.launch(launch._replace(grid=(channels, ranks - 1), jobs=others))


def reason_to_skip() -> str:
    """Why the CUDA kernels cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if not FATBIN.exists():
        return "there is a CUDA device but no fatbin: was there no nvcc, or did it fail?"
    return "" if find_spec("cupy") else "there is a CUDA device but no CuPy"
