"""The streams of a device, and their counterpart on the host, where calls are synchronous.

    caller's stream ──arrival──► comm: groups of NCCL, folds ──end──► caller's stream
                                   │                     ▲
                                   └──► reduce: folds ───┘  of collectives of several tiles

All work goes into one stream, except within `beside`, where folds have a second stream that
branches off and joins again. There, tiles of one parity form a chain: each group waits for the fold
before it and each fold for the group before it, by one event per chain. The two chains share no
memory, so they need no order between them, and a fold of one overlaps with a group of the other.

Memory: whoever starts a job keeps its tensors alive until the job's last event has completed. That
has the effect of `record_stream` without delaying the allocator's reuse.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ringdp.errors import CommunicationError, UsageError

PARITIES = 2  # chains: even tiles and odd tiles
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class End(Protocol):
    """Marks the end of a job's work on the device."""

    def query(self) -> bool: ...


class _Past:
    def query(self) -> bool:
        return True


class Streams:
    """The host's implementation, which has no streams: everything is done when it returns."""

    device = torch.device("cpu")
    room = 1 << 20  # approximate bytes of staging
    handle = 0  # the stream passed to NCCL

    def current(self) -> AbstractContextManager[object]:
        """Make the communication stream the thread's current one, for allocations and launches. The
        allocator then reuses memory in that stream's order, which differs from the caller's."""
        return nullcontext()

    def arrival(self) -> object:
        """Mark what the caller has put in its stream so far."""
        return None

    def follow(self, arrival: object) -> None:
        """Order the work issued from now on behind `arrival`."""

    def beside(self) -> AbstractContextManager[object]:
        """Within the block, folds of one chain overlap with NCCL groups of the other."""
        return nullcontext()

    def in_chain(self, chain: int, *, folds: bool) -> AbstractContextManager[object]:
        """Order the block's folds, or else its group, behind what came before in that chain."""
        return nullcontext()

    def end(self) -> End:
        """Mark the end of all work put in the streams so far."""
        return _Past()

    def settle(self, end: End) -> None:
        """Order the caller's stream behind `end`."""

    def drain(self) -> None:
        """Block until the device has done all work put in the streams."""

    def empty(self, size: int) -> Tensor:
        """uint8[size] on the device, uninitialized."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def sent(self, data: Tensor) -> Tensor:
        """Copy a CPU tensor to the device."""
        return data

    def fetched(self, data: Tensor) -> Tensor:
        """Copy received data to the CPU. It is there once the work issued so far has ended."""
        return data

    def capturing(self) -> bool:
        """Whether the caller's current stream is capturing a CUDA graph."""
        return False

    def watch(self) -> None:
        """Prepare a thread that queries events or issues work; its first call here. Makes this
        device the thread's current one. See Note [asking during a capture]."""


class CudaStreams(Streams):
    """Two streams beside the caller's: one for communication, one for folds.

    Note [asking during a capture]
        While a thread captures a graph in torch's default capture mode, an event query or an
        allocation on another thread ends the capture with an error. Threads whose own mode is
        `thread local` are exempt (cudaThreadExchangeStreamCaptureMode). So the watchdog thread and
        the issuing thread, which serves other communicators too, set that mode. The capturing
        thread never queries an event; it waits until the watchdog has seen the end.
    """

    room = 128 << 20  # see Note [how long a tile is], in nccl.tiles

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._comm = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            self._reduce = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._chains: list[torch.cuda.Event] = []  # within `beside`
        self.handle = int(self._comm.cuda_stream)

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._comm)

    def arrival(self) -> object:
        event = _event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def follow(self, arrival: object) -> None:
        assert isinstance(arrival, torch.cuda.Event)
        self._comm.wait_event(arrival)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._chains = [_event() for _ in range(PARITIES)]
        self._reduce.wait_stream(self._comm)
        try:
            yield
        finally:
            self._comm.wait_stream(self._reduce)
            self._chains = []

    @contextmanager
    def in_chain(self, chain: int, *, folds: bool) -> Iterator[None]:
        if not self._chains:
            yield
            return
        stream = self._reduce if folds else self._comm
        stream.wait_event(self._chains[chain])
        # A group need not make its stream current: NCCL is passed the handle.
        with torch.cuda.stream(stream) if folds else nullcontext():
            yield
        self._chains[chain].record(stream)

    def end(self) -> End:
        event = _event()
        event.record(self._comm)
        return event

    def settle(self, end: End) -> None:
        assert isinstance(end, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(end)

    def drain(self) -> None:
        self._comm.synchronize()

    def sent(self, data: Tensor) -> Tensor:
        return data.pin_memory().to(self.device, non_blocking=True)

    def fetched(self, data: Tensor) -> Tensor:
        host = torch.empty_like(data, device="cpu", pin_memory=True)
        return host.copy_(data, non_blocking=True)

    def capturing(self) -> bool:
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def watch(self) -> None:
        # Leaving a stream context restores the previous device. In a new thread that is GPU 0,
        # where every rank would then create a context of hundreds of MB.
        torch.cuda.set_device(self.device)
        _event().record(self._comm)  # creates the context without querying anything
        mode = ctypes.c_int(THREAD_LOCAL)
        code = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if code:
            raise CommunicationError(f"cuThreadExchangeStreamCaptureMode failed: CUresult {code}")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def streams(device: torch.device) -> Streams:
    return Streams() if device.type == "cpu" else CudaStreams(device)


def device_of(transport: str, *, host: bool) -> torch.device:
    """The device that holds tensors. Raises UsageError if not `host` and torch finds no GPU."""
    if host:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"transport {transport!r} needs a CUDA device, and torch sees none; allowed: 'shm', "
            f"'c10d', or '{transport}-host' to run its code on host memory"
        )
    return torch.device("cuda", torch.cuda.current_device())


def advice_to_install() -> str:
    """How to install CuPy and NCCL: with the extra for torch's CUDA version, if it has one."""
    major = str(torch.version.cuda).split(".")[0]
    if major in ("12", "13"):
        return f"pip install 'ringdp[cuda{major}]'"
    return "pip install 'ringdp[cuda13]' or 'ringdp[cuda12]', by the CUDA of your torch"
