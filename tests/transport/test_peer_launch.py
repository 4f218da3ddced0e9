"""How the peer-memory kernels are launched, with stand-ins for CuPy and for the kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.virtual import VirtualRanks
from ringdp.errors import CommunicationError, UsageError
from ringdp.transport.base import DTYPES
from ringdp.transport.peer import kernels as peer
from ringdp.transport.peer.jobs import kernel_name
from ringdp.transport.peer.kernels import Launch
from tests.builds import ROOT
from tests.transport.test_peer import programs

Grid = tuple[int, ...]


class RecordingKernels:
    """Kernels that only record their launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, int]] = []

    def launch(self, launch: Launch) -> None:
        self.grids.append(launch.grid)


def test_the_number_of_channels_is_limited_by_the_gpu_and_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    bounds = f"__launch_bounds__({peer.THREADS}, {peer.TOGETHER})"
    assert bounds in (ROOT / "csrc" / "cuda" / "peer.cu").read_text(encoding="utf-8")
    recording = RecordingKernels()
    for n in (2, 8, 300):
        ranks = VirtualRanks(n, slab=128, depth=1, device="cpu", kernels=recording)
        ranks.run(programs("broadcast", "binomial", n), list(torch.ones(n, 1 << 13)))
    for size in (1 << 10, 128 << 10, 1 << 20):  # a channel should move at least 64 KiB
        ranks = VirtualRanks(2, channels=4, device="cpu", kernels=recording)
        ranks.run(programs("all_reduce", "ring", 2), list(torch.ones(2, size // 4)))
    assert recording.grids == [(66, 2), (16, 8), (1, 300), (1, 2), (2, 2), (4, 2)]


class Refused(RuntimeError):
    pass


LIMIT = 132  # blocks that run at once


class Cupy:
    """Stands in for CuPy as documented and, for cooperative launches, as in its source; records
    launches."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launched: list[tuple[object, ...]] = []
        self.devices: list[object] = []  # entered by CuPy or torch
        self.refuses: str | None = None  # what fails: "load" or "launch"
        self.cuda = SimpleNamespace(
            Device=self.on,
            Stream=SimpleNamespace(from_external=self._stream),
            driver=SimpleNamespace(CUDADriverError=Refused),
        )
        self._current: list[int] = []

    def RawModule(self, *, path: str, enable_cooperative_groups: bool) -> SimpleNamespace:  # noqa: N802
        assert Path(path).exists()
        assert enable_cooperative_groups
        return SimpleNamespace(get_function=self._get)

    def _get(self, name: str) -> partial[None]:
        if self.refuses == "load":
            raise Refused("CUDA_ERROR_NO_BINARY_FOR_GPU")
        self.loaded.append(name)
        return partial(self._launch, name)

    def _launch(self, name: str, grid: Grid, block: object, args: object, *, shared_mem: int):
        if self.refuses == "launch":
            raise Refused("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
        if prod(grid) > LIMIT:
            if set(grid[1:]) <= {1}:
                grid = (LIMIT,)
            else:
                raise ValueError(f"The specified grid size exceeds the limit ({LIMIT}).")
        self.launched.append((name, grid, block, args, shared_mem, self._current[-1]))

    @contextmanager
    def on(self, device: object) -> Iterator[None]:
        self.devices.append(device)
        yield

    @contextmanager
    def _stream(self, stream: object) -> Iterator[None]:
        version, address = stream.__cuda_stream__()
        assert version == 0
        self._current.append(address)
        yield
        self._current.pop()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cupy:
    """Replaces CuPy, with a torch that sees GPUs, of which 3 is current."""
    cupy, stream = Cupy(), SimpleNamespace(__cuda_stream__=lambda: (0, 77))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", cupy.on)
    monkeypatch.setattr(peer, "FATBIN", tmp_path / "peer.fatbin")
    peer.FATBIN.touch()
    return cupy


class Jobs:
    """Stands in for a tensor on another GPU than the current one."""

    device = torch.device("cuda:1")

    def data_ptr(self) -> int:
        return 5


def test_a_launch_is_passed_to_cupy_on_the_gpu_of_its_jobs(cupy: Cupy) -> None:
    kernels = peer.CudaKernels(torch.device("cuda:3"))
    assert cupy.devices == [torch.device("cuda:3"), 3]
    kernels.launch(Launch("rows_int8", (3, 2), Jobs(), 400))
    assert cupy.devices[2:] == [Jobs.device, 1]
    assert cupy.launched == [("rows_int8", (1, 3, 2), (peer.THREADS,), (5, 0, 0, 0), 400, 77)]
    assert cupy.loaded == list(map(kernel_name, DTYPES))  # before the launch, and once


def test_driver_errors_become_errors_of_ringdp(cupy: Cupy) -> None:
    kernels = peer.CudaKernels(torch.device("cuda:3"))
    for grid in ((99, 2), (LIMIT + 1, 1), (1, LIMIT + 1)):
        match = rf"refused {grid[0]} channels of {grid[1]} ranks.*exceeds the limit"
        with pytest.raises(CommunicationError, match=match):
            kernels.launch(Launch("rows_int8", grid, Jobs(), 400))
    cupy.refuses = "launch"
    with pytest.raises(
        CommunicationError, match=r"refused 2 channels of 2 ranks.*OUT_OF_RESOURCES"
    ):
        kernels.launch(Launch("rows_int8", (2, 2), Jobs(), 400))
    cupy.refuses = "load"
    with pytest.raises(UsageError, match=r"driver of cuda:1 does not take .*NO_BINARY.*update"):
        peer.CudaKernels(torch.device("cuda:1"))


def test_errors_name_a_missing_cupy_or_fatbin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UsageError, match="needs CuPy"):
        peer.CudaKernels(torch.device("cuda:3"))
    monkeypatch.setitem(sys.modules, "cupy", object())
    monkeypatch.setattr(peer, "FATBIN", tmp_path / "peer.fatbin")
    with pytest.raises(UsageError, match="built without nvcc"):
        peer.CudaKernels(torch.device("cuda:3"))


def test_an_nvcc_that_hangs_is_ended_and_the_kernels_left_out(tmp_path: Path) -> None:
    pytest.importorskip("cmake")
    text = (ROOT / "csrc" / "cuda" / "fatbin.cmake").read_text(encoding="utf-8")
    script, nvcc = tmp_path / "fatbin.cmake", tmp_path / "nvcc"
    limit = re.findall(r"TIMEOUT \d+", text)[0]
    script.write_text(text.replace(limit, "TIMEOUT 0.5"), encoding="utf-8")
    hangs = '#!/bin/sh\n[ "$1" = --list-gpu-arch ] && echo compute_90 || sleep 600\n'
    nvcc.write_text(hangs, encoding="utf-8")
    nvcc.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "cmake",
        f"-DNVCC={nvcc}",
        "-DSOURCE=a",
        "-DOUT=b",
        "-P",
        script,
    ]
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
    assert "the kernels for peer memory are left out" in done.stderr
