"""What the NCCL transport does while a device is behind: on the host, with streams that say so."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.errors import CollectiveMismatch
from ringdp.transport.nccl.streams import End, HostStreams
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.nccl.test_transport import over_nccl

only_with_host_nccl()
pytestmark = pytest.mark.process


class Later:
    def __init__(self, passed: threading.Event) -> None:
        self._passed, self._asked = passed, False

    def query(self) -> bool:
        """Not at the first question, as on a device."""
        asked, self._asked = self._asked, True
        return asked and self._passed.is_set()


class BehindStreams(HostStreams):
    """A device on which stamps are exchanged at once and collectives end when they are told to."""

    def __init__(self) -> None:
        self.ended, self.met = threading.Event(), threading.Event()
        self.met.set()
        self.watched, self.captures, self._ends = False, False, 0

    def end(self) -> End:
        self._ends += 1  # of the stamps, then of the collective
        return Later(self.met if self._ends % 2 else self.ended)

    def capturing(self) -> bool:
        return self.captures


def behind(comm: Communicator) -> BehindStreams:
    streams = comm._transport._streams = BehindStreams()
    return streams


def barriers(comm: Communicator) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:  # the host hears of it when the stamps have come
        comm.barrier()


@over_nccl
def mistaken(comm: Communicator) -> None:
    behind(comm)
    comm.all_reduce(torch.ones(4), "sum" if comm.rank else "max", async_op=True)
    with pytest.raises(CollectiveMismatch, match="all_reduce"):
        barriers(comm)


def test_ranks_that_disagree_hear_it_though_the_device_never_ends(ranks) -> None:
    ranks(2)(mistaken)


@over_nccl
def freed(comm: Communicator) -> None:
    streams = behind(comm)
    x = torch.ones(4)
    gone = weakref.ref(x)
    work = comm.all_reduce(x, async_op=True)
    work.wait()
    del x, work
    until = time.monotonic() + 60
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None
    streams.ended.set()


def test_a_buffer_is_let_go_of_once_it_was_waited_for(ranks) -> None:
    """Not when the watching thread sees the end: until then a step would keep all its buckets."""
    ranks(2)(freed)


@over_nccl
def captured(comm: Communicator) -> None:
    streams, transport = behind(comm), comm._transport
    x = torch.ones(4)
    comm.all_reduce(x)
    streams.captures = True
    with pytest.raises(ringdp.UsageError, match="collectives under way"):
        comm.all_reduce(x)
    assert len(transport._under_way) == 1
    streams.ended.set()  # as after torch.cuda.synchronize(), which the watching thread sees late
    comm.all_reduce(x)
    assert torch.all(x == comm.size**2)
    assert not transport._open
    streams.captures = False
    comm.all_reduce(x)


def test_a_capture_waits_until_the_end_of_the_last_collective_was_seen(ranks) -> None:
    ranks(2)(captured)
