"""How the NCCL transport closes: it completes what it promised and frees all device memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ringdp import Communicator, _core
from ringdp.errors import CollectiveMismatch
from ringdp.transport.device import in_flight
from ringdp.transport.store.failures import LOOK
from tests.forks import Forks
from tests.ranks import on_ranks
from tests.transport.nccl.behind import BehindStreams, SpiedComm, put_behind
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.test_c10d import resources_are_freed
from tests.transport.test_c10d_failures import assert_rank_0_is_late, server_stops
from tests.waiting import wait_until

only_with_host_nccl()
pytestmark = pytest.mark.process


@on_ranks(2, pool="over_nccl")
def test_an_aborted_communicator_frees_its_device_memory(comm: Communicator) -> None:
    other = comm.duplicate()
    transport = other._transport
    streams = transport._streams = BehindStreams()
    streams.ended.set()
    for streams.captures in (False, True):
        other.all_reduce(torch.ones(4), algorithm="direct")
    streams.captures = False
    memory = np.ones(4, np.float32)
    references = [weakref.ref(transport._staging), weakref.ref(memory)]
    streams.ended.clear()
    other.all_reduce(torch.from_numpy(memory), async_op=True)
    del memory
    comm.barrier()
    other.abort()
    wait_until(lambda: [ref() for ref in references] == [None, None])


def test_a_closed_communicator_frees_its_resources(ranks) -> None:
    ranks(2)(resources_are_freed, "nccl-host", True)


def test_a_stopped_rank_0_that_serves_the_store_is_a_timeout(forks: Forks) -> None:
    assert_rank_0_is_late(forks(3, server_stops, "nccl-host"))


@on_ranks(2, pool="over_nccl")
def test_closing_waits_for_collectives_that_have_returned(comm: Communicator) -> None:
    other = comm.duplicate()
    streams, spied = put_behind(other), SpiedComm(other)
    x = torch.ones(4)
    other.all_reduce(x)  # returned, although the device has not finished
    closing = threading.Thread(target=other.close)
    closing.start()
    closing.join(3 * LOOK)
    assert closing.is_alive()
    assert not spied.aborted.is_set()
    streams.ended.set()
    closing.join(60)
    assert not closing.is_alive()
    wait_until(lambda: "destroy" in spied.calls)
    assert not spied.aborted.is_set(), "the collective that had returned was aborted"


@on_ranks(2, pool="over_nccl")
def test_a_rank_that_exits_publishes_its_finished_collectives(comm: Communicator) -> None:
    other = comm.duplicate()
    put_behind(other).ended.set()
    other.all_reduce(torch.ones(4))
    transport = other._transport
    transport.end()
    assert transport._status.state().record.finished == 1
    comm.barrier()


@on_ranks(2, pool="over_nccl")
def test_exiting_waits_for_collectives_that_have_returned(comm: Communicator) -> None:
    other = comm.duplicate()
    streams, transport = put_behind(other), other._transport
    other.all_reduce(torch.ones(4))  # returned, although the device has not finished
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "QUIET", 0.0)
        exiting = threading.Thread(target=transport.end)
        exiting.start()
        exiting.join(3 * LOOK)
        assert exiting.is_alive(), "a rank still in the collective would report this one lost"
        streams.ended.set()
        exiting.join(60)
    assert not exiting.is_alive()
    comm.barrier()


@on_ranks(2, pool="over_nccl")
def test_exiting_by_an_error_does_not_wait(comm: Communicator) -> None:
    other = comm.duplicate()
    put_behind(other)
    other.all_reduce(torch.ones(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight, "QUIET", 0.0)
        patch.setattr("sys.last_type", ValueError, raising=False)
        other._transport.end()  # would never return if it waited for the device
    comm.barrier()


@pytest.mark.parametrize("caught", [False, True])
@on_ranks(2, pool="over_nccl")
def test_a_device_failure_is_logged_at_exit_unless_a_call_raised_it(
    comm: Communicator, caught: bool
) -> None:
    """Then the exit code is also set to that of an error."""
    other, failed, logged = comm.duplicate(), list[None](), list[str]()
    put_behind(other)
    other.all_reduce(torch.ones(4), "max" if comm.rank else "sum", async_op=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight.Watching, "heard", False)
        patch.setattr("ringdp._core.fail_at_exit", lambda: failed.append(None))
        patch.setattr("ringdp.comm.guard.log.error", lambda text, *of: logged.append(text % of))
        if caught:
            with pytest.raises(CollectiveMismatch):
                other.barrier()
        other._transport.end()
    comm.barrier()
    if caught:
        assert (logged, failed) == ([], [])
    else:
        assert failed == [None]
        assert "CollectiveMismatch: ranks" in logged[0]
        assert "all_reduce #0 (float32, max) of 4" in logged[0]


@on_ranks(2, pool="over_nccl")
def test_closing_amid_a_collective_is_no_failure_at_exit(comm: Communicator) -> None:
    other, failed = comm.duplicate(), list[None]()
    put_behind(other)
    other.all_reduce(torch.ones(4), async_op=True)
    other.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight.Watching, "heard", False)
        patch.setattr("ringdp._core.fail_at_exit", lambda: failed.append(None))
        other._transport.end()
    assert not failed
    comm.barrier()


def test_fail_at_exit_sets_the_exit_code() -> None:
    where = repr(_core.__file__)
    script = (
        f"import sys; from importlib.machinery import ExtensionFileLoader as Loader; "
        f"_core = Loader('ringdp._core', {where}).load_module(); _core.fail_at_exit(); print('end')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"end\n")


class SlowToDestroy(SpiedComm):
    """Destroying it waits until `others` is set, as for a rank of this host that has not closed."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.others = threading.Event()

    def destroy(self) -> None:
        self.others.wait(60)
        self._comm.destroy()


@on_ranks(2, pool="over_nccl")
def test_memory_is_freed_when_destroying_nccl_takes_long(comm: Communicator) -> None:
    other = comm.duplicate()
    other.all_reduce(torch.ones(4), algorithm="direct")
    slow, memory = SlowToDestroy(other), weakref.ref(other._transport._staging)
    before, in_flight.PATIENCE = in_flight.PATIENCE, 0.0
    try:
        other.close()
        time.sleep(3 * LOOK)
    finally:
        in_flight.PATIENCE = before
    slow.others.set()
    wait_until(lambda: memory() is None)


class Unstartable:
    """A thread that cannot start because the interpreter exits, as from Python 3.12 on."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def is_alive(self) -> bool:
        return False


@on_ranks(2, pool="over_nccl")
def test_closing_at_exit_works_without_a_new_thread(comm: Communicator) -> None:
    """The communicator is kept instead: destroying NCCL's on the main thread would wait for live
    graphs."""
    other = comm.duplicate()
    nccl, spied = other._transport._nccl, weakref.ref(SpiedComm(other))
    in_flight.threading = SimpleNamespace(Thread=Unstartable)
    try:
        other._transport._leave()
    finally:
        in_flight.threading = threading
    other._transport._nccl = nccl
    gc.collect()
    assert spied() is not None, "freeing it would destroy NCCL's, which waits for live graphs"
    other.close()
