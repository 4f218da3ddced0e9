"""Over gloo: ranks that end, err or stop, where its messages, threads or store matter.

tests/comm has what holds over shared memory, too.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ringdp
from ringdp import CollectiveMismatch, CommunicationError, Communicator, PeerLost, Work
from ringdp.transport import threads
from ringdp.transport.c10d import wire
from ringdp.transport.store import failures
from ringdp.transport.store.processes import process_state
from tests.comm.failing import catch, duplicates
from tests.comm.test_late import TIMEOUT
from tests.forks import CALL_TIMEOUT, Ended, Forks, Report, die, store
from tests.ports import unused_port
from tests.ranks import on_ranks
from tests.waiting import used_asleep, wait_until

pytestmark = pytest.mark.process

SMALL, LARGE = 1000, 50_000  # elements


def polls(comm: Communicator, report: Report) -> None:
    (c,) = duplicates(comm, "c10d", 1)
    if comm.rank == 1:
        die()
    work = c.irecv(torch.ones(SMALL))
    with suppress(AssertionError):
        wait_until(work.is_completed, CALL_TIMEOUT / 6)
    report(repr(work.exception()))


def test_polling_for_a_message_of_any_rank_notices_a_death(forks: Forks):
    here, killed = forks(2, polls)
    assert (here.code, killed.code) == (0, -signal.SIGKILL)
    assert "PeerLost" in here.reported[0]
    assert "rank 1 has ended" in here.reported[0]


@pytest.mark.parametrize("message", [False, True])
@on_ranks(2, pool="forked")
def test_an_abort_between_the_parts_of_a_message_raises_on_no_thread(
    comm: Communicator, message: bool
) -> None:
    """Rank 0 aborts between the header and the data of a message from rank 1, on another thread."""
    (c,) = duplicates(comm, "c10d", 1)
    x, come, gone = torch.ones(LARGE), threading.Event(), threading.Event()
    if comm.rank == 1:
        with suppress(CommunicationError):
            c.send(x, 0) if message else c.all_reduce(x)
        return
    begin, raised = wire.Incoming.begin, list[str]()

    def late(incoming: wire.Incoming, *arguments: Any) -> Work | None:
        come.set()
        gone.wait(CALL_TIMEOUT)
        return begin(incoming, *arguments)

    with (
        patch.object(wire.Incoming, "begin", late),
        patch.object(threading, "excepthook", lambda e: raised.append(str(e.exc_value))),
    ):
        work = c.irecv(x, 1) if message else c.all_reduce(x, async_op=True)
        assert come.wait(CALL_TIMEOUT)
        before = set(threading.enumerate())
        c.abort()
        threads.join([*set(threading.enumerate()) - before])  # until its connections are cut
        gone.set()
        threads.join([t for t in before if t.name == "ringdp-c10d"])
    assert isinstance(work.exception(), PeerLost)
    assert not raised


@on_ranks(3, pool="forked")
def test_a_message_after_a_mismatch_keeps_no_thread_busy(comm: Communicator) -> None:
    """Rank 0 sees that rank 2 made another call; then comes what it has still expected of rank 1.
    If its memory were freed, gloo's thread would poll for it without end."""
    (c,), talk = duplicates(comm, "c10d", 1), store()
    x, send, sent = torch.ones(SMALL + (comm.rank == 2)), wire.sends, threading.Event()
    if comm.rank == 2:
        talk.wait(["rank 1 has called"])

    def late(*arguments: Any) -> list[Work]:
        talk.set("rank 1 has called", "")
        wait_until(c._transport.failure)
        parts = [*send(*arguments)]
        sent.set()
        return parts

    with patch.object(wire, "sends", late if comm.rank == 1 else send):
        work = c.all_gather(x.new_empty(3 * len(x)), x, algorithm="direct", async_op=True)
        with pytest.raises(CollectiveMismatch):
            work.wait()
        assert comm.rank != 1 or sent.wait(CALL_TIMEOUT)
    comm.barrier()
    used = used_asleep(0.2)
    c.close()
    assert used < 0.1


def rank_2_dies_while_0_waits_for_1(comm: Communicator, report: Report) -> None:
    """Rank 2 is killed while rank 0 waits for rank 1, which has not called the collective."""
    (c,), talk = duplicates(comm, "c10d", 1), store()
    if comm.rank == 2:
        die()
    if comm.rank == 1:
        talk.wait(["caught"])
    report(catch(c, lambda: c.broadcast(torch.ones(10), 1)))
    talk.set("caught", "")
    talk.wait(["caught"])


def test_a_death_is_reported_to_a_rank_that_waits_for_another(forks: Forks):
    here, there, (code, _) = forks(3, rank_2_dies_while_0_waits_for_1)
    assert code == -signal.SIGKILL
    for code, (caught,) in (here, there):
        assert code == 0
        assert caught.error == caught.again == "PeerLost", caught
        assert "; rank 2 has ended (process" in caught.text


def rank_0_serves(comm: Communicator) -> Any:
    """From now on rank 0 serves the job's store, while it lives; the launcher's store passes its
    pid."""
    talk = store()
    if comm.rank == 0:
        talk.set("port", str(unused_port()))
        talk.set("server", str(os.getpid()))
    os.environ["MASTER_PORT"] = talk.get("port").decode()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return talk


@on_ranks(3, pool="forked")
def test_rank_0_may_end_first_with_the_store_it_serves(comm: Communicator) -> None:
    """The job's store is served by rank 0 and ends with it."""
    talk = rank_0_serves(comm)
    whole = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT)
    other = whole.duplicate()
    for c in (whole, other):
        c.barrier()
    talk.set(f"out/{comm.rank}", "")
    talk.wait([f"out/{rank}" for rank in range(comm.size)])
    if comm.rank > 0:
        server = int(talk.get("server"))
        wait_until(lambda: process_state(server).endswith("ended"), CALL_TIMEOUT)
        time.sleep(2 * failures.LOOK)  # long enough for the others to notice
    whole.close()
    other.close()


def server_stops(comm: Communicator, report: Report, transport: str) -> None:
    """Rank 0, which serves the store, is stopped for a while."""
    talk = rank_0_serves(comm)
    whole = ringdp.init(transport=transport, timeout=CALL_TIMEOUT)
    other = whole.duplicate()
    for c in (whole, other):
        c.barrier()
    if comm.rank == 0:
        while not talk.check([f"seen/{r}" for r in (1, 2)]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
        report(catch(other, other.duplicate))  # as the others, or it may be a mismatch
        talk.set("caught/0", "")
    else:
        server = int(talk.get("server"))
        while (
            whole._transport._status._pids[0] != server
            or other._transport._status._pids[0] != server
        ):
            time.sleep(0.01)
        talk.set(f"seen/{comm.rank}", "")
        wait_until(lambda: "stopped" in process_state(server), CALL_TIMEOUT)
        report(catch(whole, lambda: whole.all_reduce(torch.ones(1), async_op=True).wait(TIMEOUT)))
        other.set_timeout(TIMEOUT)
        report(catch(other, other.duplicate))
        talk.set(f"caught/{comm.rank}", "")
        talk.wait([f"caught/{r}" for r in (1, 2)])
        os.kill(server, signal.SIGCONT)
    talk.wait([f"caught/{r}" for r in range(comm.size)])
    comm.barrier()


def test_a_stopped_rank_0_that_serves_the_store_is_a_timeout(forks: Forks):
    assert_rank_0_is_late(forks(3, server_stops, "c10d"))


def assert_rank_0_is_late(ended: list[Ended]) -> None:
    (code, (there,)), *others = ended
    assert (code, there.error) == (0, "CollectiveTimeout"), there
    for code, said in others:
        assert code == 0
        for caught in said:
            assert caught.error == caught.again == "CollectiveTimeout", caught
            assert re.search(r"; rank 0 gives no answer \(process \d+ is stopped\)", caught.text)


@on_ranks(1, pool="forked")
def test_connecting_to_a_stopped_rank_0_is_an_error(comm: Communicator) -> None:
    """The store's server accepts connections but never answers."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        os.environ |= {"MASTER_PORT": str(stopped.getsockname()[1]), "RANK": "1", "WORLD_SIZE": "2"}
        with pytest.raises(ringdp.CommunicationError, match="the store has given no answer") as e:
            ringdp.init(timeout=TIMEOUT)
    assert "rank 1 cannot reach rank 0's store at 127.0.0.1" in str(e.value)
