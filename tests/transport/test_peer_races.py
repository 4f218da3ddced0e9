"""The peer transport orders all device work by events: see `nccl.racing`."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ringdp import Communicator
from ringdp.transport.base import DTYPES
from ringdp.transport.peer.jobs import Job, kernel_name
from ringdp.transport.peer.kernels import HostKernels, Launch
from tests.ranks import on_ranks
from tests.transport.nccl.racing import Device, Streams, patch_torch

pytestmark = pytest.mark.process

SIZES = {kernel_name(dtype): dtype.itemsize for dtype in DTYPES}


class RecordingKernels:
    """Kernels whose launches record the memory that they touch, on the current stream."""

    def __init__(self, device: Device) -> None:
        self._device, self._kernels = device, HostKernels()

    def launch(self, launch: Launch) -> None:
        job, here = Job(*launch.jobs[0].tolist()), self._device.current.cuda_stream
        length = ctypes.c_int64.from_address(job.bounds + 8 * job.chunks).value
        self._device.touch("job", here, writes=False, data=launch.jobs)
        self._device.touch_bytes(
            "buffer", here, launch.buffer, length * SIZES[launch.kernel], writes=True
        )
        self._device.touch_bytes(
            "room", here, launch.room, job.active * job.scratch * job.slab, writes=True
        )
        self._kernels.launch(launch)


def racing(comm: Communicator, patch: pytest.MonkeyPatch) -> Device:
    device, transport = patch_torch(patch), comm._transport
    transport._streams = streams = Streams(device)
    transport._staging = streams.empty(0)
    transport._kernels = RecordingKernels(device)
    return device


def call_all_reduces(device: Device, comm: Communicator) -> None:
    """Calls algorithms with and without scratch, with two sizes."""
    here = device.current.cuda_stream
    for algorithm, elements in (("direct", 1000), ("ring", 77), ("tree", 1000)):
        x = torch.ones(elements, dtype=torch.bfloat16)
        device.touch("caller", here, writes=True, data=x)
        comm.all_reduce(x, algorithm=algorithm)
        device.touch("caller again", here, writes=True, data=x)
        assert torch.all(x == comm.size)


@pytest.mark.parametrize("n", [2, 3])
@on_ranks(pool="over_peer")
def test_collectives_on_two_streams_do_not_race(comm: Communicator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = racing(comm, patch)
        side = device.stream()
        for captures in (False, True):
            call_all_reduces(device, comm)
            with device.using(side):
                call_all_reduces(device, comm)
            assert not device.races, device.races[0]
            if not captures:
                device.capture()
        device.capturing = False
