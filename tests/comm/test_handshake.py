"""Making a communicator while a rank is missing: every other rank gets an error that names it."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

import ringdp
from ringdp import CollectiveMismatch, CommunicationError, Communicator, PeerLost
from ringdp.comm import rendezvous
from ringdp.comm.rendezvous import _Connector, over
from ringdp.transport.base import Failure, FailureKind
from ringdp.transport.c10d import wire
from ringdp.transport.shm import transport as shm
from ringdp.transport.store import handshake
from ringdp.transport.store.processes import introduce
from tests import limits
from tests.comm.failing import catch, connect
from tests.comm.test_deaths import ALLOWED, ENDS
from tests.comm.test_groups import total
from tests.forks import CALL_TIMEOUT, Forks, Report, die, meet, store
from tests.ranks import on_ranks
from tests.transport.test_store_client import Stopped

pytestmark = pytest.mark.process

MAKE: dict[str, Callable[[Communicator], Communicator | None]] = {
    "duplicate": lambda c: c.duplicate(),
    "split": lambda c: c.split(0),
}


def one_rank_ends_before(
    comm: Communicator, report: Report, how: str, transport: str, make: str
) -> None:
    with ringdp.init(transport=transport, timeout=comm.timeout) as whole:
        whole.barrier()
        comm.barrier()  # otherwise a rank still in that barrier could notice the death there
        if comm.rank == 0:
            report(time.monotonic())
            ENDS[how][0]()
        report(catch(whole, lambda: MAKE[make](whole)))


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    ("how", "transport"), [("killed", "shm"), ("raising", "c10d"), ("killed", "peer-host")]
)
def test_a_rank_that_ended_before_the_handshake_is_named(
    forks: Forks, how: str, transport: str, make: str
):
    (_, (died,)), *others = forks(3, one_rank_ends_before, how, transport, make)
    for code, (caught,) in others:
        assert code == 0
        assert caught.error == caught.again == "PeerLost"
        assert "rank 0 has ended" in caught.text
        assert caught.at - died < ALLOWED


def refuse(*_: object, **__: object) -> None:
    raise CommunicationError("no shared memory here")


def fail_during_handshake(
    comm: Communicator, report: Report, transport: str, victim: int, dies: bool
) -> None:
    """The victim dies, or fails, after the handshake has begun; the others wait for its data or for
    itself."""
    whole = ringdp.init(transport=transport, timeout=comm.timeout)
    comm.barrier()
    if comm.rank == victim:
        act = die if dies else refuse
        if transport == "c10d":
            wire.ProcessGroupGloo = act
        else:
            shm.create = shm.open_other = act
    try:
        whole.duplicate()
    except CommunicationError as e:
        report((type(e).__name__, str(e)))
    comm.barrier() if not dies else None  # leaving earlier would be reported as a loss too


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_rank_that_ends_or_fails_during_the_handshake_is_named(
    forks: Forks, transport: str, victim: int, dies: bool
):
    ended = forks(3, fail_during_handshake, transport, victim, dies)
    assert ended.pop(victim).code == (-signal.SIGKILL if dies else 0)
    why = "has ended" if dies else r"has aborted \(.*no shared memory here\)"
    for code, ((error, text),) in ended:
        assert (code, error) == (0, "PeerLost")
        assert re.search(f"rank {victim} {why}", text), text


def die_before_introduction(comm: Communicator, report: Report, transport: str, make: str) -> None:
    """The victim dies in the handshake before it introduces itself, although all ranks share a
    first communicator."""
    whole = ringdp.init(transport=transport, timeout=comm.timeout)
    comm.barrier()

    def begin(*given: Any, **named: Any) -> None:
        meet(comm, "agreed")  # otherwise one could notice the death in the collective before
        die() if comm.rank == 0 else introduce(*given, **named)

    handshake.introduce = begin
    report(catch(whole, lambda: MAKE[make](whole)))


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("transport", ["shm", "c10d", "peer-host"])
def test_a_rank_that_ends_before_its_introduction_is_named(forks: Forks, transport: str, make: str):
    _, *others = forks(3, die_before_introduction, transport, make)
    for code, (caught,) in others:
        assert (code, caught.error) == (0, "PeerLost")
        assert "waited to make a communicator; rank 0 has ended" in caught.text
        assert caught.seconds < ALLOWED


@on_ranks(3)
def test_a_rank_that_is_late_is_waited_for(comm: Communicator) -> None:
    for make in MAKE.values():
        comm.barrier()
        time.sleep(0.3 * (comm.rank == 1))
        made = make(comm)
        assert total(made, 1) == comm.size
        made.close()


@on_ranks(3, pool="forked")
def test_the_users_timeout_limits_the_handshake(comm: Communicator) -> None:
    """Rank 1 never comes."""
    others, talk = (0, 2), store()
    if comm.rank == 1:
        talk.wait([f"caught/{r}" for r in others])
        return
    comm.set_timeout(3.0)  # a busy machine may stop a rank for a second
    meet(comm, "here", without=1)  # so neither is late for the other
    caught = catch(comm, comm.duplicate)
    talk.set(f"caught/{comm.rank}", "")
    assert caught.error == "CollectiveTimeout"
    assert "rank 1 has not called it" in caught.text


@on_ranks(2)
def test_a_late_rank_learns_that_the_others_gave_up(comm: Communicator) -> None:
    """Ranks that connect for the first time; one does not come in time."""
    part = dist.PrefixStore(f"late/{comm.issued}", comm._connect.store)
    if comm.rank == 0:
        with pytest.raises(ringdp.CollectiveTimeout, match="of its ranks, 1 did not come"):
            connect(part, 0, 2, timeout=0.3)
    comm.barrier()
    if comm.rank == 1:
        with pytest.raises(ringdp.CollectiveTimeout, match="rank 0 gave up waiting"):
            connect(part, 1, 2)
    comm.barrier()


@on_ranks(2)
def test_the_timeout_that_was_set_last_limits_the_making(comm: Communicator) -> None:
    with comm.duplicate() as whole:
        whole.set_timeout(comm.timeout / 2)
        with patch.object(whole, "_connect", Mock(wraps=whole._connect)) as connected:
            whole.duplicate().close()
        assert connected.call_args.args[2] == whole.timeout != comm.timeout


def communicator_over_a_group_with_a_missing_rank(
    comm: Communicator, report: Report, ends: bool
) -> None:
    talk, timeout = store(), timedelta(seconds=CALL_TIMEOUT)
    dist.init_process_group("gloo", store=talk, rank=comm.rank, world_size=2, timeout=timeout)
    if not ends:  # now that both have come
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    if comm.rank == 1:
        die() if ends else talk.wait(["caught"])
        with pytest.raises(CommunicationError, match="but one was late or has left"):
            over(dist.group.WORLD)
        return
    with pytest.raises(CommunicationError) as e:
        over(dist.group.WORLD)
    report((type(e.value).__name__, str(e.value)))
    talk.set("caught", "")


@pytest.mark.parametrize(("ends", "error"), [(True, "PeerLost"), (False, "CollectiveTimeout")])
def test_the_missing_rank_of_a_group_is_named(forks: Forks, ends: bool, error: str):
    here, there = forks(2, communicator_over_a_group_with_a_missing_rank, ends)
    assert (here.code, there.code) == (0, -signal.SIGKILL if ends else 0)
    ((found, text),) = here.reported
    assert found == error
    assert "of its ranks, 1 had not come" in text


@pytest.mark.parametrize(
    ("kind", "error", "cause"),
    [
        (FailureKind.MISMATCH, CollectiveMismatch, "rank 1 made another call"),
        (FailureKind.STOPPED, CommunicationError, "its communicator was closed"),
    ],
)
def test_a_failure_of_the_parent_ends_the_making_with_its_error(
    kind: FailureKind, error: type[CommunicationError], cause: str
):
    parent = handshake.Places(dist.HashStore(), range(2), lambda: Failure(kind, 1, 1))
    making = handshake.Handshake(dist.HashStore(), 0, 2, CALL_TIMEOUT, parent)
    with (
        pytest.raises(error, match=f"waited to make a communicator; {cause}") as e,
        making.session(),
    ):
        making.barrier("all")
    assert e.type is error


def test_a_death_is_named_rather_than_its_effect():
    """Such as a connection that a dead rank has reset."""
    store = dist.HashStore()
    making = handshake.Handshake(store, 0, 2, CALL_TIMEOUT)

    def connect() -> None:
        place = store.get("place/0").decode()
        store.set("place/1", place.replace(str(os.getpid()), str(other.pid)))
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        raise RuntimeError("connection reset")

    with (
        subprocess.Popen(["true"]) as other,
        pytest.raises(PeerLost, match="waited to make a communicator; rank 1"),
        making.session(),
    ):
        making.run(connect)


@on_ranks(1)
def test_a_failed_creation_closes_its_files(comm: Communicator) -> None:
    """The first file is closed if the second cannot be created."""
    made: list[int] = []

    def create(name: str, size: int, *, reserve: bool) -> int:
        if made:
            raise CommunicationError("no shared memory")
        made.append(os.memfd_create(name))
        return made[0]

    with patch.object(shm, "create", create), pytest.raises(CommunicationError):
        comm.duplicate()
    assert not Path(f"/proc/self/fd/{made[0]}").exists()


def no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


@on_ranks(2, pool="forked")
def test_a_rank_that_fails_in_the_last_step_is_named(comm: Communicator) -> None:
    """On rank 1 the last step of the handshake fails, after the other rank has finished."""

    def dup(_: object) -> int:
        comm.barrier()  # the other rank's is behind its handshake
        return no_descriptor()

    if comm.rank == 1:
        with patch.object(shm, "dup", dup):
            caught = catch(comm, comm.duplicate)
        assert "Too many open files. A communicator holds" in caught.text
    else:
        other = comm.duplicate()
        comm.barrier()
        caught = catch(other, other.barrier)
        assert (caught.error, "rank 1 has aborted" in caught.text) == ("PeerLost", True)
        assert caught.seconds < ALLOWED


def assert_rank_1_has_no_descriptor(comm: Communicator, make: Callable[[], object]) -> None:
    start = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        make()
    seconds = time.monotonic() - start
    comm.barrier()
    if comm.rank == 0:
        assert caught.type is PeerLost
        assert re.search(r"rank 1 has aborted \(.*Too many open files", str(caught.value))
        assert seconds < ALLOWED
    else:
        assert caught.type is CommunicationError


@on_ranks(2, pool="forked")
def test_a_rank_without_a_free_descriptor_is_named(comm: Communicator) -> None:
    def duplicate() -> None:
        with limits.no_descriptor() if comm.rank == 1 else nullcontext():
            comm.duplicate()

    assert_rank_1_has_no_descriptor(comm, duplicate)


@on_ranks(2, pool="forked")
def test_a_failure_after_the_ranks_have_connected_is_named(comm: Communicator) -> None:
    """On rank 1 the transport cannot be created."""
    whole = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT)
    comm.barrier()
    missing = patch.object(rendezvous, "C10dTransport", no_descriptor)
    with missing if comm.rank == 1 else nullcontext():
        assert_rank_1_has_no_descriptor(comm, lambda: whole.duplicate().barrier())


@on_ranks(1)
def test_failing_to_create_a_file_is_a_communication_error(comm: Communicator) -> None:
    with (
        patch.object(os, "memfd_create", no_descriptor),
        pytest.raises(
            CommunicationError, match=r"no shared memory: .* Too many open files.*ulimit"
        ),
    ):
        comm.duplicate()


def test_more_than_1023_ranks_are_refused():
    with pytest.raises(ringdp.UsageError, match="1024 ranks; allowed: at most 1023"):
        Communicator(None, range(1024), name="many", timeout=1.0, warn_after=1.0)  # type: ignore[arg-type]


def test_listing_a_communicator_in_a_stopped_store_times_out() -> None:
    stopped = Stopped()
    try:
        with pytest.raises(ringdp.CollectiveTimeout, match=r"timeout of 0\.2 s"):
            _Connector(stopped, 0, 1, "whole", "c10d", None)("name", [0], 0.2, None)
    finally:
        stopped.goes_on.set()
