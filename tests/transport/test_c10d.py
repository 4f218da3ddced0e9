"""The transport over torch.distributed: the simulator's bits, the communicator's functions,
failures."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

import ringdp
from ringdp import Communicator, Work
from ringdp.comm.rendezvous import over
from ringdp.transport.base import Link
from ringdp.transport.c10d.shutdown import BATCH
from tests.comm import test_messages
from tests.comm.failing import catch, held
from tests.forks import CALL_TIMEOUT
from tests.ports import CONNECTED, sockets
from tests.ranks import on_ranks
from tests.transport.offered import offered
from tests.transport.over import init_over
from tests.transport.test_conformance import ROWS, Case, assert_simulators_bits
from tests.waiting import wait_until

pytestmark = pytest.mark.process

LENGTHS = (0, 1, 7, 1003)
DTYPES = ("float32", "bfloat16", "int16", "bool")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_algorithm_gives_the_simulators_bits_over_gloo(over_gloo, n: int):
    cases = [
        Case(*row, LENGTHS[(i + k + n) % 4], DTYPES[(i + 3 * k) % 4])
        for k in (0, 1)
        for i, row in enumerate(ROWS)
    ]
    cases += [Case("all_reduce", "direct", 50_000 + n, d) for d in DTYPES]
    # messages over INLINE, on up to 4 ranks
    cases += [Case(*row, 80_003, ("float32", "int32")[i % 2]) for i, row in enumerate(ROWS)]
    assert_simulators_bits(over_gloo(n), n, cases)


@pytest.mark.parametrize("n", [2, 3])
@on_ranks(pool="over_gloo")
def test_all_communicator_functions_work_over_gloo(comm: Communicator) -> None:
    offered(comm)
    test_messages.check_any_order(comm, 3)
    test_messages.check_short_messages_need_no_receiver(comm)
    with pytest.raises(ringdp.UsageError, match="tags are 0"):
        comm.send(torch.zeros(1), (comm.rank + 1) % comm.size, tag=1 << 30)
    with pytest.raises(ringdp.UsageError, match="CPU"):
        comm.all_reduce(torch.zeros(1, device="meta"))


@on_ranks(3)
def test_a_communicator_can_use_any_gloo_group(comm: Communicator) -> None:
    if not dist.is_initialized():  # another test may have left it initialized
        store = dist.PrefixStore(f"of_a_group/{comm.issued}", comm._connect.store)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    evens = dist.new_group(range(0, comm.size, 2))
    for group in (dist.group.WORLD, evens):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        with over(group, transport="c10d") as whole, whole.duplicate() as other:
            x = torch.ones(5)
            other.all_reduce(x)
            whole.all_reduce(x)
            assert torch.all(x == whole.size**2)
            parts = whole.split(0, key=-whole.rank)
            assert parts is not None
            assert parts.rank == whole.size - 1 - whole.rank
            parts.barrier()
            dist.barrier(group)  # otherwise a rank that is still in it would report this rank lost
            parts.close()
    comm.barrier()
    dist.destroy_process_group()


@on_ranks(3, pool="over_gloo")
def test_a_rank_that_awaits_two_messages_says_which_has_not_come(comm: Communicator) -> None:
    """Rank 0 awaits those of rank 2 and, ahead, of rank 1, which is late."""
    x, out = torch.ones(50_000), torch.empty(150_000)

    def begin() -> Work:
        return comm.all_gather(out, x, algorithm="direct", async_op=True)

    def awaited() -> int:
        record = comm._transport.record(0)
        return -1 if record is None else record.waits_for

    works = [begin()] if comm.rank != 1 else []
    if comm.rank == 0:
        wait_until(lambda: awaited() == 1, CALL_TIMEOUT / 6, awaited)
        comm.send(x, 1)
    elif comm.rank == 1:
        comm.recv(x, 0)
        works = [begin()]
    works[0].wait()
    assert out.eq(1).all()


@on_ranks(2, pool="over_gloo")
def test_a_message_sent_just_before_closing_arrives(comm: Communicator) -> None:
    """Even if it has not been sent yet."""
    x = torch.full((9,), float(comm.rank))
    with comm.duplicate() as other:
        other.barrier()
        if comm.rank == 0:
            other.send(x, 1)
            other.close()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.1)
            other.recv(x)
            assert not x.any()


@on_ranks(2, pool="over_gloo")
def test_short_messages_that_no_rank_has_received_share_threads(comm: Communicator) -> None:
    comm._transport._watch()  # starts threads, as a call does that waits for long
    x, before = torch.ones(9), set(threading.enumerate())
    with comm.duplicate() as other:
        other.barrier()
        if comm.rank == 0:
            fixed = set(threading.enumerate())
            for tag in range(4 * BATCH):
                other.send(x, 1, tag=tag)
            assert len(set(threading.enumerate()) - fixed) < BATCH  # 4, and some that wait for jobs
            other.close()
        comm.barrier()
        if comm.rank == 1:
            for tag in reversed(range(4 * BATCH)):
                other.recv(x, 0, tag=tag)
            other.close()
        wait_until(lambda: not set(threading.enumerate()) - before, state=threading.enumerate)
        comm.barrier()


@on_ranks(2, pool="over_gloo")
def test_a_message_of_another_length_is_a_mismatch_on_both(comm: Communicator) -> None:
    """Mismatched collectives are tested in test_c10d_failures.py."""
    x = torch.ones(5000)
    act = (lambda: comm.recv(x[1:], 0)) if comm.rank else (lambda: comm.send(x, 1))
    caught = catch(comm, act, comm.barrier, comm.barrier)
    assert caught.error == caught.again == "CollectiveMismatch", caught
    assert "expected 19996 bytes of float32 with tag 0 from rank 0" in caught.text


def resources_are_freed(comm: Communicator, transport: str, closes: bool) -> None:
    """A communicator's threads and descriptors are freed with it, even though every rank watches
    the others."""
    with init_over(comm, transport) as whole:
        whole._transport._watch()
        whole.barrier()
        comm.barrier()
        before, running = held(), set(threading.enumerate())
        for _ in range(2):
            other = whole.duplicate()
            other._transport._watch()
            other.all_reduce(torch.ones(5))
            if closes:
                other.close()
            del other
        wait_until(
            lambda: not held() - before and not set(threading.enumerate()) - running,
            state=lambda: (held() - before, threading.enumerate()),
        )
        comm.barrier()


def connections_to_the_store(comm: Communicator) -> int:
    """How many connections to the job's store another communicator makes. Each could cost a query
    to a name server."""
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    before = set(sockets(CONNECTED))
    with comm.duplicate() as other:
        other.barrier()
        connected_before = set(sockets(CONNECTED)) - before
    return sum(there.endswith(port) for _, there in connected_before)


@pytest.mark.parametrize("pool", ["over_gloo", "over_nccl", "over_peer"])
def test_a_communicator_makes_one_connection_to_the_store(request, pool: str):
    assert request.getfixturevalue(pool)(2)(connections_to_the_store) == [1, 1]


@pytest.mark.parametrize("closes", [False, True])
def test_closed_and_dropped_communicators_free_their_resources(ranks, closes: bool):
    ranks(2)(resources_are_freed, "c10d", closes)


@on_ranks(2)
def test_a_forked_child_may_drop_its_communicators(comm: Communicator) -> None:
    """As where its garbage is collected. To join a thread that the child lacks is to read its
    stack, of which glibc unmaps all but some."""
    made = [init_over(comm, "c10d")]
    made += [made[0].duplicate() for _ in range(6)]
    closes = made[:]
    pid = os.fork()
    if pid == 0:
        made.clear()
        closes.clear()
        gc.collect()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for one in closes:
        one.close()
    assert status == 0


def test_unknown_transports_and_options_are_refused():
    with pytest.raises(ringdp.UsageError, match="shm, c10d"):
        ringdp.init(transport="tcp")
    with pytest.raises(ringdp.UsageError, match="shared memory only"):
        ringdp.init(transport="c10d", link=Link(0.1, 1e9))
