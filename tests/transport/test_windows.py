"""Windows: what a rank publishes of its own, and which of the others' it refuses; CUDA's with a
stub."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringdp.errors import CommunicationError
from ringdp.transport.peer.transport import agreed
from ringdp.transport.peer.windows import HANDLE_BYTES, CudaWindows, HostWindows
from ringdp.transport.shm import files

SIZE = 4096


class StubHandshake:
    """Stands in for the Handshake of rank 0: records what it publishes and returns what others
    published."""

    rank = 0

    def __init__(self, *others: str) -> None:
        self.ranks = 1 + len(others)
        self.published: dict[str, str] = {
            f"window/{r}": published for r, published in enumerate(others, 1)
        }

    def publish(self, key: str, what: str) -> None:
        self.published[key] = what

    def read(self, key: str, rank: int) -> bytes:
        return self.published[key].encode()

    def barrier(self, what: str) -> None: ...


def make_window(size: int) -> tuple[int, str]:
    """Another rank's window, made in this process."""
    fd = files.create("ringdp-window-1", size, reserve=False)
    return fd, f"{os.getpid()} {fd}"


def test_each_rank_can_write_to_the_others_windows() -> None:
    fd, where = make_window(SIZE)
    windows = HostWindows(StubHandshake(where), SIZE)
    assert len(set(windows.addresses)) == 2
    ctypes.memmove(windows.addresses[1] + 5, b"hello", 5)
    assert os.pread(fd, 5, 5) == b"hello"
    mapped = Path("/proc/self/maps")
    windows.close()
    assert mapped.read_text(encoding="utf-8").count("memfd:ringdp-window") == 1
    windows.free()
    assert "memfd:ringdp-window" not in mapped.read_text(encoding="utf-8")
    os.close(fd)


def test_malformed_windows_are_refused() -> None:
    small, where = make_window(SIZE // 2)
    pipe, other = os.pipe()
    before = set(os.listdir("/proc/self/fd"))
    for published, message in (
        ("", "rank 1's window cannot be at b''"),
        ("1 2 3", "cannot be at"),
        ("x y", "cannot be at"),
        (where, "a window of 2048 bytes; this rank's has 4096"),
        (f"{os.getpid()} {pipe}", "is not the shared memory of a rank 1"),
        (f"{os.getpid()} 9999", "cannot open rank 1's shared memory"),
    ):
        with pytest.raises(CommunicationError, match=message):
            HostWindows(StubHandshake(published), SIZE)
    assert set(os.listdir("/proc/self/fd")) == before
    for fd in (small, pipe, other):
        os.close(fd)


@pytest.mark.parametrize("published", ["", "0", "-1", "x", "9" * 5000])
def test_malformed_channels_are_refused(published: str) -> None:
    handshake = StubHandshake("")
    handshake.published["channels/1"] = published
    with pytest.raises(CommunicationError, match=r"rank 1 cannot have b'.*' channels"):
        agreed(16, handshake)


class Refused(RuntimeError):
    pass


class Runtime:
    """Stands in for cupy.cuda.runtime as documented, as far as it is used."""

    CUDARuntimeError = Refused

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.mark = SIZE, 1  # what an opened window contains

    def malloc(self, size: int) -> int:
        self.calls.append(("malloc", size))
        return 1 << 30

    def ipcGetMemHandle(self, address: int) -> bytes:  # noqa: N802
        return bytes([7]) * HANDLE_BYTES

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:  # noqa: N802
        if handle[0] == 9:
            raise Refused("cudaErrorPeerAccessUnsupported")
        self.calls.append(("open", handle, flags))
        return 1 << 40

    def ipcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        self.calls.append(("close", address))
        raise Refused("the window is gone")

    def memcpy(self, to: int, source: int, size: int, kind: int) -> None:
        self.calls.append(("memcpy", to if kind == 1 else source, kind))
        if kind == 1:
            assert list((ctypes.c_int64 * 2).from_address(source)) == [SIZE, 0]
        else:
            ctypes.memmove(to, (ctypes.c_int64 * 2)(*self.mark), size)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()

    @contextmanager
    def on(device: object) -> Iterator[None]:
        yield

    cuda = SimpleNamespace(runtime=runtime, Device=on)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.cuda, "device", on)
    return runtime


def test_windows_on_gpus_are_mapped_by_their_handles(runtime: Runtime) -> None:
    theirs, published = bytes([5]) * HANDLE_BYTES, StubHandshake((bytes([5]) * HANDLE_BYTES).hex())
    windows = CudaWindows(torch.device("cuda:1"), published, SIZE)
    own = 1 << 30
    assert windows.addresses == [own, 1 << 40]
    assert published.published["window/0"] == (bytes([7]) * HANDLE_BYTES).hex()
    assert runtime.calls == [
        ("malloc", SIZE),
        ("memset", own, 0, SIZE),
        ("memcpy", own + 8, 1),
        ("deviceSynchronize",),  # before another rank writes there
        ("open", theirs, 1),
        ("memcpy", (1 << 40) + 8, 2),
    ]
    runtime.calls.clear()
    windows.close()
    windows.free()
    assert runtime.calls == [("close", 1 << 40), ("free", own)]


@pytest.mark.parametrize("mark", [(0, 0), (SIZE, 2), (2 * SIZE, 1)])
def test_a_window_of_another_rank_or_size_is_closed_and_refused(
    runtime: Runtime, mark: tuple[int, int]
) -> None:
    """As from a damaged message, or of another communicator."""
    runtime.mark = mark
    with pytest.raises(CommunicationError, match="it is no window of 4096 bytes of rank 1"):
        CudaWindows(torch.device("cuda:1"), StubHandshake("05" * HANDLE_BYTES), SIZE)
    assert runtime.calls[-2:] == [("close", 1 << 40), ("free", 1 << 30)]


def test_unreachable_gpus_and_malformed_handles_are_errors(runtime: Runtime) -> None:
    for published, message in (
        (
            "09" * HANDLE_BYTES,
            "cannot have and map windows of 4096 bytes: cudaErrorPeerAccessUnsupported; .*NVLink",
        ),
        ("05", "rank 2's window cannot be at"),
        ("no handle", "rank 2's window cannot be at"),
    ):
        with pytest.raises(CommunicationError, match=message):
            CudaWindows(torch.device("cuda:1"), StubHandshake("05" * HANDLE_BYTES, published), SIZE)
        assert runtime.calls[-2:] == [("close", 1 << 40), ("free", 1 << 30)]
