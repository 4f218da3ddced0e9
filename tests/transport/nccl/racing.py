"""Finds data races of a transport on a GPU without having one: streams, events and accesses are
simulated.

Every stream counts its operations and knows, as a vector clock (Lamport 1978), how far each other
stream was at the events that it has waited for. Two accesses of a byte, one of them a write, race
unless the later one's stream has waited for the earlier one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ringdp import Communicator
from ringdp.transport.device.streams import CudaStreams
from ringdp.transport.nccl import execute
from ringdp.transport.nccl.execute import Nccl

Clock = dict[int, int]  # stream -> the number of its operations


class Access(NamedTuple):
    what: str
    stream: int
    at: int
    begin: int
    end: int
    writes: bool


class Device:
    """`races`: pairs of accesses that are not ordered."""

    def __init__(self) -> None:
        self.races = list[tuple[Access, Access]]()
        self.capturing = self.idle = False
        self._clocks = list[Clock]()
        self._accesses = list[Access]()
        self._kept = list[Tensor]()  # kept alive, so that no other tensor gets their addresses
        self._lock = threading.RLock()
        self._here = threading.local()
        self.default = self.stream()

    def stream(self, *_: Any, **__: Any) -> Stream:
        self._clocks.append({})
        return Stream(self, len(self._clocks) - 1)

    @property
    def current(self) -> Stream:
        return getattr(self._here, "stream", self.default)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current, stream
        yield
        self._here.stream = before

    def capture(self) -> None:
        """From now on all launches are captured into a graph; everything before it has ended."""
        self.idle = self.capturing = True
        self._accesses.clear()

    def clock(self, stream: int) -> Clock:
        return self._clocks[stream]

    def touch(self, what: str, stream: int, *, writes: bool, data: Tensor | None = None) -> None:
        if data is not None:
            self._kept.append(data)
            self.touch_bytes(what, stream, data.data_ptr(), data.nbytes, writes=writes)

    def touch_bytes(self, what: str, stream: int, begin: int, size: int, *, writes: bool) -> None:
        with self._lock:
            clock = self._clocks[stream]
            clock[stream] = clock.get(stream, 0) + 1
            made = Access(what, stream, clock[stream], begin, begin + size, writes)
            for other in self._accesses:
                common = other.begin < made.end and made.begin < other.end
                known = clock.get(other.stream, 0) >= other.at
                if common and (other.writes or writes) and not known:
                    self.races.append((other, made))
            self._accesses.append(made)


class Stream:
    def __init__(self, device: Device, index: int) -> None:
        self._device, self.cuda_stream = device, index

    def wait_event(self, event: Event) -> None:
        if event.clock is not None:
            assert event.captured == self._device.capturing, (
                "one event is inside a captured graph, the other outside"
            )
            mine = self._device.clock(self.cuda_stream)
            for stream, at in event.clock.items():
                mine[stream] = max(at, mine.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Nothing to do: the simulated work is done at once."""


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.captured = device, False
        self.clock: Clock | None = None

    def record(self, stream: Stream) -> None:
        self.clock = dict(self._device.clock(stream.cuda_stream))
        self.captured = self._device.capturing

    def query(self) -> bool:
        assert not self.captured, "an event of a captured graph was queried"
        return self._device.idle


class Streams(CudaStreams):
    """The NCCL transport's streams on the host, with short tiles."""

    room = 1 << 9

    def __init__(self, device: Device) -> None:
        self._racing = device
        super().__init__(torch.device("cpu"))

    def empty(self, size: int) -> Tensor:
        made = super().empty(size)
        self._racing.touch("empty", self.handle, writes=True, data=made)
        return made

    def sent(self, data: Tensor) -> Tensor:
        made = data.clone()
        self._racing.touch("sent", self.handle, writes=True, data=made)
        return made

    def fetched(self, data: Tensor) -> Tensor:
        self._racing.touch("fetched", self.handle, writes=False, data=data)
        return data.clone()

    def capturing(self) -> bool:
        return self._racing.capturing

    def watch(self) -> None:
        """There is no driver to configure."""


class Comm:
    """Records NCCL's accesses and passes them on."""

    def __init__(self, device: Device, nccl: Nccl) -> None:
        self._device, self._comm = device, nccl.comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def send(self, data: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._device.touch_bytes("send", stream, data, count, writes=False)
        self._comm.send(data, count, dtype, peer, 0)

    def recv(self, data: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._device.touch_bytes("recv", stream, data, count, writes=True)
        self._comm.recv(data, count, dtype, peer, 0)


def patch_torch(patch: pytest.MonkeyPatch) -> Device:
    """Makes torch use a simulated device."""
    device = Device()
    patch.setattr(torch.cuda, "Stream", device.stream)
    patch.setattr(torch.cuda, "Event", type("Made", (Event,), {"__init__": _with(device)}))
    patch.setattr(torch.cuda, "stream", device.using)
    patch.setattr(torch.cuda, "device", lambda _: nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda _=None: device.current)
    return device


def racing(comm: Communicator, patch: pytest.MonkeyPatch) -> Device:
    """Puts the communicator's transport on a simulated device."""
    device, transport = patch_torch(patch), comm._transport
    streams = Streams(device)
    transport._streams, transport._staging = streams, streams.empty(0)
    transport._nccl = transport._nccl._replace(comm=Comm(device, transport._nccl), streams=streams)
    fold_tile: Callable[..., None] = execute.fold_tile

    def folded(tiles: Any, fold: Any, tile: int, op: Any) -> None:
        here = device.current.cuda_stream
        for part in fold.parts:
            read = tiles.place(part, fold.like, tile)
            device.touch("fold", here, writes=False, data=read)
        device.touch("fold", here, writes=True, data=tiles.place(fold.out, fold.like, tile))
        fold_tile(tiles, fold, tile, op)

    patch.setattr(execute, "fold_tile", folded)
    return device


def _with(device: Device) -> Callable[..., None]:
    return lambda event, *_, **__: Event.__init__(event, device)
