"""Messages that cannot be delivered: another length, a lost peer, no memory. Both ranks get an
error."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ringdp
from ringdp import Communicator
from tests.comm.failing import Caught, catch, fallible, until_failed
from tests.comm.test_failures import ALLOWED
from tests.comm.test_messages import LARGE
from tests.forks import Forks, Report, store
from tests.limits import address_space_limit

pytestmark = pytest.mark.process

# float32; the longest message whose send does not wait for the receiver
SLAB, MANY = 16 << 10, 4000


@fallible
def send_and_recv_mismatched(comm: Communicator, sent: Tensor, expected: Tensor) -> Caught | None:
    """The receiver gets the error at once, the sender at its next call at the latest."""
    if comm.rank == 0:
        return catch(comm, lambda: comm.send(sent, 1, tag=5), comm.barrier)
    return catch(comm, lambda: comm.recv(expected, 0, tag=5))


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
def test_another_length_or_dtype_is_an_error_on_both(ranks, sent, expected, shows):
    for caught in ranks(2)(send_and_recv_mismatched, sent, expected):
        assert caught.error == caught.again == "CollectiveMismatch"
        assert shows in caught.text
        assert "rank 1 expected" in caught.text
        assert caught.seconds < ALLOWED


@fallible
def wait_for_nothing(comm: Communicator, what: str) -> Caught | None:
    x = torch.zeros(LARGE)
    if comm.rank == 1:
        until_failed(comm)
        return catch(comm, comm.barrier)
    work = comm.irecv(x, 1, tag=3) if what == "recv" else comm.isend(x, 1, tag=3)
    return catch(comm, lambda: work.wait(0.2))


@pytest.mark.parametrize("what", ["recv", "send"])
def test_a_message_that_does_not_come_is_a_timeout(ranks, what):
    here, there = ranks(2)(wait_for_nothing, what)
    assert here.error == here.again == there.error == "CollectiveTimeout"
    assert f"rank 0 waited for {what} #0 (float32, " in here.text
    assert "rank 1) of 100000 elements, tag 3, at " in here.text
    assert f"{Path(__file__).name}:" in here.text
    assert f"has not {'received' if what == 'send' else 'sent'} it" in here.text
    assert here.seconds < ALLOWED


def peer_is_killed(comm: Communicator) -> list[Caught | None]:
    """Rank 1 dies in the middle of a message; each kind of call uses a communicator of its own."""
    x = torch.zeros(50 * LARGE)
    with comm.duplicate() as a, comm.duplicate() as b, comm.duplicate() as c:
        comm.barrier()
        if comm.rank == 1:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                comm.send(x, 0)
        within = [catch(comm, lambda: [comm.recv(x, 1) for _ in range(1000)])] * (comm.rank == 0)
        others = [
            catch(a, lambda: a.recv(x, 1)),
            catch(b, lambda: b.recv(x)),
            catch(c, lambda: c.send(x, 1)),
        ]
        return within + others


def test_a_killed_peer_is_named(fresh_ranks):
    found = fresh_ranks(3).outcomes(peer_is_killed)
    assert found[1] is None
    for rank in (0, 2):
        for caught in found[rank]:
            assert caught.error == caught.again == "PeerLost"
            assert "rank 1 has ended" in caught.text
            assert caught.seconds < ALLOWED


@fallible
def recv_after_rank_1_closed(comm: Communicator) -> Caught | None:
    """A rank that has closed does not prevent messages from another."""
    x = torch.zeros(10)
    if comm.rank == 1:
        return None
    if comm.rank == 2:
        time.sleep(0.3)
        comm.send(x, 0)
        return catch(comm, lambda: comm.recv(x, 0))
    assert comm.recv(x) == 2
    return catch(comm, lambda: comm.recv(x, 1))


@fallible
def poll_lost_messages(comm: Communicator) -> list[str]:
    """Polls messages that cannot be delivered any more, without waiting."""
    if comm.rank == 1:
        return []
    x = torch.zeros(LARGE)
    works = [comm.irecv(x, 1), comm.isend(x, 1)]
    for work in works:
        while not work.is_completed():
            time.sleep(0.001)
    return [type(work.exception()).__name__ for work in works]


def test_polling_a_message_detects_a_lost_peer(ranks):
    assert ranks(2)(poll_lost_messages)[0] == ["PeerLost"] * 2


def test_a_peer_that_closed_is_lost_to_a_waiting_rank(ranks):
    here, left, there = ranks(3)(recv_after_rank_1_closed)
    assert left is None
    assert here.error == there.error == "PeerLost"
    assert "rank 1 has ended" in here.text


def call_without_memory(comm: Communicator) -> list[str]:
    x, peer, texts = torch.zeros(10), 1 - comm.rank, []
    with comm.duplicate() as other, address_space_limit(1 << 20):
        calls: list[Callable[[], object]] = [
            lambda: other.send(x, peer),
            lambda: other.irecv(x, peer),
            ringdp.init,
        ]
        for call in calls:
            with pytest.raises(ringdp.CommunicationError) as error:
                call()
            texts.append(str(error.value))
    return texts


def test_a_lack_of_memory_is_a_communication_error(fresh_ranks):
    """The `init` of rank 1 may fail for lack of a thread's stack, before it has connected to rank
    0."""
    for *messages, init in fresh_ranks(2)(call_without_memory):
        assert all("Cannot allocate memory" in text for text in messages)
        assert re.search("Cannot allocate memory|can't start new thread", init), init


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
