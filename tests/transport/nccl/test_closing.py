"""How the NCCL transport ends: after what it has promised, with nothing left on the device."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringdp import Communicator, _core
from ringdp.errors import CollectiveMismatch
from ringdp.transport.device import in_flight
from ringdp.transport.store.failures import LOOK
from tests.forks import Forks
from tests.ranks import on_ranks
from tests.transport.nccl.behind import BehindStreams, Spied, behind
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.test_c10d import assert_rank_0_is_late, resources_are_freed, server_stops

only_with_host_nccl()
pytestmark = pytest.mark.process


@on_ranks(2, pool="over_nccl")
def test_what_has_closed_keeps_nothing_on_the_device(comm: Communicator) -> None:
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


def test_nothing_stays_of_one_that_is_closed(ranks) -> None:
    ranks(2)(resources_are_freed, "nccl-host", True)


def test_a_rank_0_that_is_stopped_with_its_store_is_late(forks: Forks) -> None:
    assert_rank_0_is_late(forks(3, server_stops, "nccl-host"))


@on_ranks(2, pool="over_nccl")
def test_closing_waits_for_what_was_waited_for(comm: Communicator) -> None:
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


@on_ranks(2, pool="over_nccl")
def test_what_has_ended_counts_for_who_exits_before_it_was_seen(comm: Communicator) -> None:
    other = comm.duplicate()
    behind(other).ended.set()
    other.all_reduce(torch.ones(4))
    transport = other._transport
    transport.end()
    assert transport._status.state().record.finished == 1
    comm.barrier()


@on_ranks(2, pool="over_nccl")
def test_who_exits_waits_for_what_was_waited_for(comm: Communicator) -> None:
    other = comm.duplicate()
    streams, transport = behind(other), other._transport
    other.all_reduce(torch.ones(4))  # it has returned, and the device is behind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "QUIET", 0.0)
        exiting = threading.Thread(target=transport.end)
        exiting.start()
        exiting.join(3 * LOOK)
        assert exiting.is_alive(), "who is still in it would lose this rank"
        streams.ended.set()
        exiting.join(60)
    assert not exiting.is_alive()
    comm.barrier()


@on_ranks(2, pool="over_nccl")
def test_who_exits_by_an_error_waits_for_nobody(comm: Communicator) -> None:
    other = comm.duplicate()
    behind(other)
    other.all_reduce(torch.ones(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "QUIET", 0.0)
        patch.setattr("sys.last_type", ValueError, raising=False)
        other._transport.end()  # which would wait for ever
    comm.barrier()


def exits_unheard(comm: Communicator, caught: bool) -> tuple[list[str], int]:
    """What it says, and whether it exits with an error."""
    other, failed, said = comm.duplicate(), list[None](), list[str]()
    behind(other)
    other.all_reduce(torch.ones(4), "max" if comm.rank else "sum", async_op=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight.Watching, "heard", False)
        patch.setattr("ringdp._core.fail_at_exit", lambda: failed.append(None))
        patch.setattr("ringdp.comm.guard.log.error", lambda text, *of: said.append(text % of))
        if caught:
            with pytest.raises(CollectiveMismatch):
                other.barrier()
        other._transport.end()
    comm.barrier()
    return said, len(failed)


def test_what_failed_on_a_device_and_no_call_has_raised_is_said_at_exit(over_nccl) -> None:
    for said, failed in over_nccl(2)(exits_unheard, False):
        assert failed == 1
        assert "CollectiveMismatch: ranks" in said[0]
        assert "all_reduce #0 (float32, max) of 4" in said[0]


def test_what_a_call_has_raised_is_not_said_again_at_exit(over_nccl) -> None:
    assert over_nccl(2)(exits_unheard, True) == [([], 0)] * 2


def test_an_exit_code_is_that_of_an_error_though_python_ends_well() -> None:
    where = repr(_core.__file__)
    script = (
        f"import sys; from importlib.machinery import ExtensionFileLoader as Loader; "
        f"_core = Loader('ringdp._core', {where}).load_module(); _core.fail_at_exit(); print('end')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"end\n")


class Slow(Spied):
    """Its destruction waits for a rank of this host that has not closed."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.others = threading.Event()

    def destroy(self) -> None:
        self.others.wait(60)
        self._comm.destroy()


@on_ranks(2, pool="over_nccl")
def test_who_closes_long_before_the_others_keeps_no_memory_either(comm: Communicator) -> None:
    other = comm.duplicate()
    other.all_reduce(torch.ones(4), algorithm="direct")
    slow, memory = Slow(other), weakref.ref(other._transport._staging)
    before, in_flight.PATIENCE = in_flight.PATIENCE, 0.0
    try:
        other.close()
        time.sleep(3 * LOOK)
    finally:
        in_flight.PATIENCE = before
    slow.others.set()
    until = time.monotonic() + 60
    while memory() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert memory() is None


class Unstartable:
    """A thread at exit, from Python 3.12 on."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def is_alive(self) -> bool:
        return False


@on_ranks(2, pool="over_nccl")
def test_at_exit_it_goes_without_the_thread_that_would_end_nccl(comm: Communicator) -> None:
    """And without an end of NCCL on the main thread, after all has gone well."""
    other = comm.duplicate()
    nccl, spied = other._transport._nccl, weakref.ref(Spied(other))
    in_flight.threading = SimpleNamespace(Thread=Unstartable)
    try:
        other._transport._leave()
    finally:
        in_flight.threading = threading
    other._transport._nccl = nccl
    gc.collect()
    assert spied() is not None, "its end would be NCCL's, which waits for graphs that are there"
    other.close()
