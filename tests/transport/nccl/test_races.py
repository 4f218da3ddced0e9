"""Whatever the NCCL transport launches is ordered by events, not by luck: see `racing`."""

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
from tests.transport.nccl.racing import Device, faked, racing

only_with_host_nccl()
pytestmark = pytest.mark.process

ELEMENTS = 1000  # several tiles of either parity
SHORT = 30  # one tile


def copying_first(n: int) -> Schedule:
    """It begins with what no group comes before."""
    kept = tuple(Transfer(r, r, 0, 1, False) for r in range(n))
    sent = tuple(Transfer(s, r, 1, 0, True) for r in range(n) for s in range(n) if s != r)
    return Schedule(ranks=n, chunks=1, rounds=(kept, sent))


def called(
    device: Device, comm: Communicator, elements: int, algorithm: str | Builder, op: str
) -> None:
    here, x = device.current.cuda_stream, torch.ones(elements)
    device.touch("caller", here, writes=True, data=x)
    comm.all_reduce(x, op, algorithm=algorithm)
    device.touch("caller again", here, writes=True, data=x)


def on_two_streams(device: Device, comm: Communicator) -> None:
    """By algorithms whose stagings have different shapes, so that rows of both parities are used by
    one where the other parity's were."""
    side = device.stream()
    for algorithm in ("two_way_ring", "doubling"):
        for op in ("sum", "max"):
            called(device, comm, ELEMENTS, algorithm, op)
            with device.using(side):
                for elements in (ELEMENTS // 3, SHORT):
                    called(device, comm, elements, "direct", op)
    called(device, comm, ELEMENTS // 3, copying_first, "sum")


@pytest.mark.parametrize("n", [2, 3])
@on_ranks(pool="over_nccl")
def test_collectives_in_turn(comm: Communicator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = racing(comm, patch)
        on_two_streams(device, comm)
        assert not device.races, device.races[0]
        device.capture()
        on_two_streams(device, comm)
        device.capturing = False
        assert not device.races, device.races[0]


def test_a_thread_asks_the_device_nothing_before_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins while the user captures, as to end a communicator. And it stays there: see
    what torch does where a stream of another device is left."""
    modes, devices = list[int](), list[torch.device]()

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
            modes.append(mode._obj.value)
            return 0

    faked(monkeypatch)  # whose streams cannot be asked
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    one = torch.device("cuda:1")
    CudaStreams(one).watch()
    assert (modes, devices) == ([THREAD_LOCAL], [one])
