"""The NCCL transport orders all device work by events: see `racing`."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from ringdp import Communicator
from ringdp.schedule import Builder, Schedule, Transfer
from ringdp.transport.device.streams import THREAD_LOCAL, CudaStreams
from tests.ranks import on_ranks
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.nccl.racing import Device, Event, patch_torch, racing

only_with_host_nccl()
pytestmark = pytest.mark.process

ELEMENTS = 1000  # several tiles of either parity
SHORT = 30  # one tile


def copy_first(n: int) -> Schedule:
    """An all_reduce that begins with a local copy, which no group of messages precedes."""
    kept = tuple(Transfer(r, r, 0, 1, False) for r in range(n))
    sent = tuple(Transfer(s, r, 1, 0, True) for r in range(n) for s in range(n) if s != r)
    return Schedule(ranks=n, chunks=1, rounds=(kept, sent))


def call_all_reduce(
    device: Device, comm: Communicator, elements: int, algorithm: str | Builder, op: str
) -> None:
    here, x = device.current.cuda_stream, torch.ones(elements)
    device.touch("caller", here, writes=True, data=x)
    comm.all_reduce(x, op, algorithm=algorithm)
    device.touch("caller again", here, writes=True, data=x)


def call_on_two_streams(device: Device, comm: Communicator) -> None:
    """Algorithms whose stagings differ in shape, so that one parity's rows overlap the other's of
    the call before."""
    side = device.stream()
    for algorithm in ("two_way_ring", "doubling"):
        for op in ("sum", "max"):
            call_all_reduce(device, comm, ELEMENTS, algorithm, op)
            with device.using(side):
                for elements in (ELEMENTS // 3, SHORT):
                    call_all_reduce(device, comm, elements, "direct", op)
    call_all_reduce(device, comm, ELEMENTS // 3, copy_first, "sum")


@pytest.mark.parametrize("n", [2, 3])
@on_ranks(pool="over_nccl")
def test_collectives_on_two_streams_do_not_race(comm: Communicator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = racing(comm, patch)
        call_on_two_streams(device, comm)
        assert not device.races, device.races[0]
        device.capture()
        call_on_two_streams(device, comm)
        device.capturing = False
        assert not device.races, device.races[0]
        patch.setattr(Event, "record", lambda *_: None)  # now events order nothing
        call_on_two_streams(device, comm)
        assert device.races, "no race would be found"


def test_new_threads_set_their_capture_mode_and_device_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new thread, such as one that ends a communicator, must query nothing before it has set its
    capture mode (Note [asking during a capture]), since the user may be capturing. It also makes
    the device current: leaving a stream would otherwise create a context on GPU 0."""
    modes, devices = list[int](), list[torch.device]()

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
            modes.append(mode._obj.value)
            return 0

    patch_torch(monkeypatch)  # its streams fail if they are queried
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    one = torch.device("cuda:1")
    CudaStreams(one).watch()
    assert (modes, devices) == ([THREAD_LOCAL], [one])
