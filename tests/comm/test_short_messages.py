"""Short messages, which C++ moves at once where it can: their order, what they keep, and errors."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import ringdp
from ringdp import Communicator
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

LARGE = 100_000  # float32; several slabs


@on_ranks(2)
def test_short_messages_that_can_move_at_once_need_no_python(comm: Communicator) -> None:
    """But each of them counts in the numbers that errors show."""
    with comm.duplicate() as other:
        x, peer = torch.arange(10, dtype=torch.int16), 1 - comm.rank
        for first in (True, False):  # the first message reserves memory
            with patch.object(other, "_new_message", wraps=other._new_message) as spy:
                other.send(x, peer)
                other.send(x + 1, dst=peer, tag=3)
                assert other.isend(x + 2, peer, tag=3).is_completed()
                other.barrier()
                found = torch.zeros(3, 10, dtype=torch.int16)
                assert other.recv(found[0], peer) == peer
                assert other.recv(found[1], src=peer, tag=3) == other.recv(found[2], tag=3) == peer
            assert torch.equal(found, torch.stack([x, x + 1, x + 2]))
            assert (spy.call_count > 0) is first
        work = other.irecv(x, peer)
        assert work._call[0] == 12
        other.send(x, peer)
        work.wait()


@on_ranks(2)
def test_short_messages_keep_their_order_behind_others(comm: Communicator) -> None:
    """Behind a receive that is posted, a message that waits for its receive, and a long one."""
    x, peer, long = torch.arange(10.0), 1 - comm.rank, torch.full((LARGE,), 7.0)
    for _ in range(3):
        first = torch.zeros(2, 10)
        posted = [comm.irecv(y, peer) for y in first]
        for value in range(3):
            comm.send(x + value, peer)
        comm.send(x + 5, peer, tag=1)
        sent = comm.isend(long, peer)
        comm.send(x + 6, peer)
        rest, whole = torch.zeros(3, 10), torch.zeros(LARGE)
        for y, tag in zip(rest[:2], (1, 0), strict=True):
            comm.recv(y, tag=tag)
        comm.recv(whole, peer)
        comm.recv(rest[2], peer)
        for work in (*posted, sent):
            work.wait()
        assert torch.equal(first, torch.stack([x, x + 1]))
        assert torch.equal(rest, torch.stack([x + 5, x + 2, x + 6]))
        assert torch.equal(whole, long)


@on_ranks(2)
def test_short_messages_let_go_of_the_tensors_of_earlier_ones(comm: Communicator) -> None:
    x = torch.zeros(4)
    with comm.duplicate() as other:
        if comm.rank == 0:
            other.isend(torch.zeros(LARGE), 1)
        else:
            other.recv(torch.zeros(LARGE), 0)
        comm.barrier()
        if comm.rank == 0:
            assert len(other._transport.messages) == 1
            other.send(x, 1)
        else:
            other.recv(x, 0)
        assert not other._transport.messages


@on_ranks(3)
def test_a_rank_that_keeps_sending_does_not_keep_others_waiting(comm: Communicator) -> None:
    most, x = 100, torch.zeros(4)
    with comm.duplicate() as other:
        for _ in range(2):  # at the first receive from any rank, and later
            sent = {0: 0, 1: 2, 2: 1}[comm.rank]
            for _ in range(sent):
                other.send(x, 0)
            if comm.rank == 0:
                other.recv(x, 1)
                other.recv(x, 1)
            other.barrier()
            if comm.rank == 1:
                for _ in range(most):
                    other.send(x, 0)
            senders = []
            for _ in range(most + 1 if comm.rank == 0 else 0):
                senders.append(other.recv(x))
                time.sleep(1e-3)  # meanwhile rank 1 fills its channel
            if comm.rank == 0:
                assert senders.index(2) < most / 3
            other.barrier()


@on_ranks(2)
def test_a_communicator_that_is_closed_while_it_looks_at_the_tensor(comm: Communicator) -> None:
    """As a finalizer or another thread may do."""
    other, x, peer = comm.duplicate(), torch.zeros(4), 1 - comm.rank
    other.send(x, peer)
    other.recv(x, peer)
    y = torch.zeros(4)
    y.is_neg = lambda: bool(other.close())  # type: ignore[func-returns-value, method-assign]
    with pytest.raises(ringdp.CommunicationError, match="send on a communicator that has been clo"):
        other.send(y, peer)


@pytest.mark.parametrize("given", [torch.zeros(3), torch.zeros(4, dtype=torch.int32)])
@on_ranks(2)
def test_a_short_message_that_does_not_fit_is_a_mismatch(comm: Communicator, given: Tensor) -> None:
    with comm.duplicate() as other:
        x, peer = torch.zeros(4), 1 - comm.rank
        for _ in range(2):
            other.send(x, peer)
            other.recv(x, peer)
        if comm.rank == 0:
            other.send(given, 1)
        with pytest.raises(ringdp.CollectiveMismatch, match="expected 16 bytes of float32"):
            other.recv(x, peer)


@on_ranks(2)
def test_a_rank_may_close_after_a_short_message(comm: Communicator) -> None:
    """A short message can be received after its sender has closed."""
    for _ in range(20):
        with comm.duplicate() as other:
            if comm.rank == 0:
                other.send(torch.full((100,), 7.0), 1)
            else:
                x = torch.zeros(100)
                other.recv(x, 0)
                assert torch.all(x == 7)
