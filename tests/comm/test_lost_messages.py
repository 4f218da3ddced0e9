"""Messages that cannot be delivered: another length, a lost peer, no memory. Both ranks get an
error."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ringdp
from ringdp import Communicator
from tests.comm.failing import catch, duplicates, fallible, until_failed
from tests.comm.test_failures import ALLOWED
from tests.comm.test_messages import LARGE
from tests.forks import Forks, Report, die, meet, store
from tests.limits import address_space_limit
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

# float32; the longest message whose send does not wait for the receiver
SLAB, MANY = 16 << 10, 4000


@pytest.mark.parametrize(
    ("sent", "expected", "shows"),
    [
        (torch.zeros(4), torch.zeros(2), "expected 8 bytes of float32 with tag 5 from rank 0, "
         "which sent 16 bytes of float32"),
        (torch.zeros(LARGE), torch.zeros(7), "which sent 400000 bytes"),
        (torch.zeros(2), torch.zeros(LARGE), "which sent 8 bytes"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), "16 bytes of float32"),
    ],
)  # fmt: skip
@on_ranks(2)
@fallible
def test_another_length_or_dtype_is_an_error_on_both(
    comm: Communicator, sent: Tensor, expected: Tensor, shows: str
) -> None:
    """The receiver gets the error at once, the sender at its next call at the latest."""
    if comm.rank == 0:
        caught = catch(comm, lambda: comm.send(sent, 1, tag=5), comm.barrier)
    else:
        caught = catch(comm, lambda: comm.recv(expected, 0, tag=5))
    assert caught.error == caught.again == "CollectiveMismatch"
    assert shows in caught.text
    assert "rank 1 expected" in caught.text
    assert caught.seconds < ALLOWED


@pytest.mark.parametrize("what", ["recv", "send"])
@on_ranks(2)
@fallible
def test_a_message_that_does_not_come_is_a_timeout(comm: Communicator, what: str) -> None:
    x = torch.zeros(LARGE)
    if comm.rank == 1:
        until_failed(comm)
        assert catch(comm, comm.barrier).error == "CollectiveTimeout"
        return
    work = comm.irecv(x, 1, tag=3) if what == "recv" else comm.isend(x, 1, tag=3)
    caught = catch(comm, lambda: work.wait(0.2))
    assert caught.error == caught.again == "CollectiveTimeout"
    assert f"rank 0 waited for {what} #0 (float32, " in caught.text
    assert "rank 1) of 100000 elements, tag 3, at " in caught.text
    assert f"{Path(__file__).name}:" in caught.text
    assert f"has not {'received' if what == 'send' else 'sent'} it" in caught.text
    assert caught.seconds < ALLOWED


def peer_is_killed(comm: Communicator, report: Report, transport: str) -> None:
    """Rank 1 dies in the middle of a message; each kind of call uses a communicator of its own."""
    x = torch.zeros(50 * LARGE)
    whole, a, b, c = duplicates(comm, transport, 4)
    if comm.rank == 1:
        threading.Timer(0.05, die).start()
        while True:
            whole.send(x, 0)
    if comm.rank == 0:
        report(catch(whole, lambda: [whole.recv(x, 1) for _ in range(1000)]))
    report(catch(a, lambda: a.recv(x, 1)))
    report(catch(b, lambda: b.recv(x)))
    report(catch(c, lambda: c.send(x, 1)))
    meet(comm, "caught", without=1)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_killed_peer_is_named(forks: Forks, transport: str):
    first, (code, _), last = forks(3, peer_is_killed, transport)
    assert code == -signal.SIGKILL
    for code, reported in (first, last):
        assert code == 0
        for caught in reported:
            assert caught.error == caught.again == "PeerLost"
            assert "rank 1 has ended" in caught.text
            assert caught.seconds < ALLOWED


@on_ranks(3)
@fallible
def test_a_peer_that_closed_is_lost_to_a_waiting_rank(comm: Communicator) -> None:
    """A rank that has closed does not prevent messages from another."""
    x = torch.zeros(10)
    if comm.rank == 1:
        return
    if comm.rank == 2:
        time.sleep(0.3)
        comm.send(x, 0)
        assert catch(comm, lambda: comm.recv(x, 0)).error == "PeerLost"
        return
    assert comm.recv(x) == 2
    caught = catch(comm, lambda: comm.recv(x, 1))
    assert caught.error == "PeerLost"
    assert "rank 1 has ended" in caught.text


@on_ranks(2)
@fallible
def test_polling_a_message_detects_a_lost_peer(comm: Communicator) -> None:
    """A message that cannot be delivered any more, without waiting."""
    if comm.rank == 1:
        return
    x = torch.zeros(LARGE)
    works = [comm.irecv(x, 1), comm.isend(x, 1)]
    for work in works:
        while not work.is_completed():
            time.sleep(0.001)
        error = work.exception()
        assert isinstance(error, ringdp.PeerLost)
        assert work.exception() is error


@on_ranks(2, pool="fresh_ranks")
def test_a_lack_of_memory_is_a_communication_error(comm: Communicator) -> None:
    """The `init` of rank 1 may fail for lack of a thread's stack, before it has connected to rank
    0."""
    x, peer = torch.zeros(10), 1 - comm.rank
    with comm.duplicate() as other, address_space_limit(1 << 20):
        for call in (lambda: other.send(x, peer), lambda: other.irecv(x, peer)):
            with pytest.raises(ringdp.CommunicationError, match="Cannot allocate memory"):
                call()
        why = "Cannot allocate memory|can't start new thread"
        with pytest.raises(ringdp.CommunicationError, match=why):
            ringdp.init()


def fill_memory_with_messages(comm: Communicator, report: Report) -> None:
    """Messages without a receive fill rank 1's memory until there is none left."""
    talk = store()
    with comm.duplicate() as other:
        if comm.rank == 1:
            work = other.irecv(torch.zeros(1), 0, tag=1)  # from now on a thread receives messages
            with address_space_limit(8 << 20):
                talk.set("short", "")
                until_failed(other)
            report(catch(other, work.wait))
        else:
            talk.wait(["short"])
            x = torch.zeros(SLAB)
            report(catch(other, *[lambda: other.isend(x, 1)] * MANY, other.barrier))


def test_a_rank_without_memory_for_messages_aborts_with_the_reason(forks: Forks):
    (_, (there,)), (_, (here,)) = forks(2, fill_memory_with_messages)
    assert there.error == here.error == "PeerLost"
    assert "rank 1 has aborted" in there.text
    assert "rank 1 has aborted (std::bad_alloc)" in here.text
