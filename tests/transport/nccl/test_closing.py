"""How the NCCL transport ends: after what it has promised, with nothing left on the device."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringdp import Communicator
from ringdp.transport.device import under_way
from ringdp.transport.told import LOOK
from tests.forks import Forks
from tests.transport.nccl.behind import BehindStreams, Spied, behind
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.over import over_nccl
from tests.transport.test_c10d import gone_again, is_late, server_stops

only_with_host_nccl()
pytestmark = pytest.mark.process


@over_nccl
def closed(comm: Communicator) -> None:
    other = comm.duplicate()
    transport = other._transport
    streams = transport._streams = BehindStreams()
    streams.ended.set()
    for streams.captures in (False, True):
        other.all_reduce(torch.ones(4), algorithm="direct")
    streams.captures = False
    x = torch.ones(4)
    gone = [weakref.ref(transport._staging), weakref.ref(x)]
    streams.ended.clear()
    other.all_reduce(x, async_op=True)
    del x
    comm.barrier()
    other.abort()
    until = time.monotonic() + 60
    while any(ref() is not None for ref in gone) and time.monotonic() < until:
        time.sleep(0.01)
    assert [ref() for ref in gone] == [None, None]


def test_what_has_closed_keeps_nothing_on_the_device(ranks) -> None:
    ranks(2)(closed)


def test_nothing_stays_of_one_that_is_closed(ranks) -> None:
    ranks(2)(gone_again, "nccl-host", True)


def test_a_rank_0_that_is_stopped_with_its_store_is_late(forks: Forks) -> None:
    is_late(forks(3, server_stops, "nccl-host"))


@over_nccl
def promised(comm: Communicator) -> None:
    other = comm.duplicate()
    streams, spied = behind(other), Spied(other)
    x = torch.ones(4)
    other.all_reduce(x)  # it has returned, and the device is behind
    closing = threading.Thread(target=other.close)
    closing.start()
    closing.join(3 * LOOK)
    assert closing.is_alive()
    assert not spied.aborted.is_set()
    streams.ended.set()
    closing.join(60)
    assert not closing.is_alive()
    until = time.monotonic() + 60
    while "destroy" not in spied.calls and time.monotonic() < until:
        time.sleep(0.01)
    assert not spied.aborted.is_set(), "what the call promised was left half done"


def test_closing_waits_for_what_was_waited_for(ranks) -> None:
    ranks(2)(promised)


@over_nccl
def exits_at_once(comm: Communicator) -> None:
    other = comm.duplicate()
    behind(other).ended.set()
    other.all_reduce(torch.ones(4))
    transport = other._transport
    transport.end()
    assert transport._does.state().record.finished == 1
    comm.barrier()


def test_what_has_ended_counts_for_who_exits_before_it_was_seen(ranks) -> None:
    ranks(2)(exits_at_once)


class Slow(Spied):
    """Its destruction waits for a rank of this host that has not closed."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.others = threading.Event()

    def destroy(self) -> None:
        self.others.wait(60)
        self._comm.destroy()


@over_nccl
def outlived(comm: Communicator) -> None:
    other = comm.duplicate()
    other.all_reduce(torch.ones(4), algorithm="direct")
    slow, memory = Slow(other), weakref.ref(other._transport._staging)
    before, under_way.PATIENCE = under_way.PATIENCE, 0.0
    try:
        other.close()
        time.sleep(3 * LOOK)
    finally:
        under_way.PATIENCE = before
    slow.others.set()
    until = time.monotonic() + 60
    while memory() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert memory() is None


def test_who_closes_long_before_the_others_keeps_no_memory_either(ranks) -> None:
    ranks(2)(outlived)


class Unstartable:
    """A thread at exit, from Python 3.12 on."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def is_alive(self) -> bool:
        return False


@over_nccl
def exiting(comm: Communicator) -> None:
    other = comm.duplicate()
    nccl, spied = other._transport._nccl, weakref.ref(Spied(other))
    under_way.threading = SimpleNamespace(Thread=Unstartable)
    try:
        other._transport._leave()
    finally:
        under_way.threading = threading
    other._transport._nccl = nccl
    gc.collect()
    assert spied() is not None, "its end would be NCCL's, which waits for graphs that are there"
    other.close()


def test_at_exit_it_goes_without_the_thread_that_would_end_nccl(ranks) -> None:
    """And without an end of NCCL on the main thread, after all has gone well."""
    ranks(2)(exiting)
