"""Streams of a device, or of the host, where a call has done its work when it returns.

    caller's stream ──arrival──► comm: groups of NCCL, folds ──end──► caller's stream
                                   │                     ▲
                                   └──► reduce: folds ───┘  of collectives of several tiles

What is launched goes into one stream. Only within `beside` folds have a stream of their own, which
branches off and comes back. There, tiles of one parity form a chain, in which every group waits for
the fold before it, and every fold for the group before it: an event for each chain says so. The two
chains touch no common memory. So nothing else needs an order, and a fold of one runs beside a group
of the other.

Memory: whoever starts a job keeps its tensors until the job's last event has passed, which is what
`record_stream` would do, without holding back what the allocator may reuse.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ringdp.errors import CommunicationError, UsageError

PARITIES = 2  # chains
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class End(Protocol):
    """The end of a job's work."""

    def query(self) -> bool: ...


class _Past:
    def query(self) -> bool:
        return True


class Streams:
    """No stream at all: those of the host."""

    device = torch.device("cpu")
    room = 1 << 20  # bytes of staging, about
    handle = 0  # the stream that NCCL is given

    def current(self) -> AbstractContextManager[object]:
        """For a thread: allocate and launch on this device, where groups go. What the allocator
        gives is free in the order of that stream, which the caller's is not."""
        return nullcontext()

    def arrival(self) -> object:
        """What the caller has put in its stream so far."""
        return None

    def follow(self, arrival: object) -> None:
        """Let what comes wait for that."""

    def beside(self) -> AbstractContextManager[object]:
        """In the block folds of one chain run while groups of another do."""
        return nullcontext()

    def moving(self, chain: int) -> AbstractContextManager[object]:
        return nullcontext()

    def folding(self, chain: int) -> AbstractContextManager[object]:
        return nullcontext()

    def end(self) -> End:
        """Of all that has been put in the streams."""
        return _Past()

    def settle(self, end: End) -> None:
        """Let the caller's stream wait for that."""

    def drain(self) -> None:
        """Wait until all has been done."""

    def empty(self, size: int) -> Tensor:
        """Bytes."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def sent(self, data: Tensor) -> Tensor:
        """A CPU tensor, on the device."""
        return data

    def fetched(self, data: Tensor) -> Tensor:
        """What a group has brought, on the CPU once the work so far has been done."""
        return data

    def capturing(self) -> bool:
        """Whether what the caller launches becomes part of a CUDA graph."""
        return False

    def watch(self) -> None:
        """For a thread that asks for ends or issues, before all else: see Note [asking during a
        capture]. From then on this device is its current one."""


class CudaStreams(Streams):
    """Two streams beside those of the caller.

    Note [asking during a capture]
        While a thread captures a graph in the mode that is torch's default, another one that asks
        whether an event has passed, or allocates, ends the capture with an error. Only a thread
        whose own mode is `thread local` may (cudaThreadExchangeStreamCaptureMode), so those of the
        watching thread and of the issuing one, which serves other communicators, are; the capturing
        one never asks, and waits until the other has seen the end.
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

    def moving(self, chain: int) -> AbstractContextManager[object]:
        return self._linked(chain, self._comm)  # whatever the current stream: NCCL has its handle

    @contextmanager
    def folding(self, chain: int) -> Iterator[None]:
        if not self._chains:
            yield
            return
        with self._linked(chain, self._reduce), torch.cuda.stream(self._reduce):
            yield

    @contextmanager
    def _linked(self, chain: int, stream: torch.cuda.Stream) -> Iterator[None]:
        if not self._chains:
            yield
            return
        stream.wait_event(self._chains[chain])
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
        # Whoever leaves a stream goes back to the device before it: to GPU 0 in a new thread, where
        # every rank would then have a context, of hundreds of MB.
        torch.cuda.set_device(self.device)
        _event().record(self._comm)  # a first call, which asks nothing: for a context
        mode = ctypes.c_int(THREAD_LOCAL)
        code = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if code:
            raise CommunicationError(f"cuThreadExchangeStreamCaptureMode failed: CUresult {code}")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def streams(device: torch.device) -> Streams:
    return Streams() if device.type == "cpu" else CudaStreams(device)


def device_of(transport: str, *, host: bool) -> torch.device:
    """Where tensors are to be. Raises UsageError where there is no GPU, and `host` is not asked."""
    if host:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"transport {transport!r} needs a CUDA device, and torch sees none; allowed: 'shm', "
            f"'c10d', or '{transport}-host' to run its code on host memory"
        )
    return torch.device("cuda", torch.cuda.current_device())
