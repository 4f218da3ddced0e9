"""The transport over torch.distributed: the simulator's bits, the communicator's functions,
failures."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringdp
from ringdp import Communicator, Work
from ringdp.comm.rendezvous import over
from ringdp.transport.base import Link
from ringdp.transport.c10d.shutdown import BATCH
from ringdp.transport.store import failures
from ringdp.transport.store.processes import process_state
from tests.comm import test_messages
from tests.comm.failing import Caught, catch, held
from tests.comm.test_late import TIMEOUT
from tests.forks import CALL_TIMEOUT, Ended, Forks, Report, store
from tests.ports import CONNECTED, sockets, unused_port
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


def kill_rank_1(comm: Communicator) -> list[Caught | None]:
    c = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT)
    others = [c.duplicate() for _ in range(2)]
    c.barrier()
    comm.barrier()  # otherwise a rank still in the first barrier could notice the death there
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(5000)
    a, b = others
    calls = (lambda: c.all_reduce(x), c), (lambda: a.recv(x), a), (lambda: b.recv(x, 1), b)
    return [catch(on, call) for call, on in calls]


def test_a_killed_rank_is_named_on_every_other(fresh_ranks):
    said = fresh_ranks(3).outcomes(kill_rank_1)
    assert said[1] is None
    for rank in (0, 2):
        for caught in said[rank]:
            assert caught.error == caught.again == "PeerLost", caught
            assert "rank 1 has ended" in caught.text


def rank_2_dies_while_0_waits_for_1(comm: Communicator, report: Report) -> None:
    """Rank 2 is killed while rank 0 waits for rank 1, which has not called the collective."""
    c, talk = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT), store()
    c.barrier()
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
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


@on_ranks(3)
def test_a_rank_that_closes_is_lost_to_the_others(comm: Communicator) -> None:
    """Rank 1 closes while the others still need it."""
    c = init_over(comm, "c10d")
    c.barrier()
    comm.barrier()
    if comm.rank == 1:
        c.close()
        comm.barrier()
        return
    caught = catch(c, c.barrier)
    comm.barrier()
    c.close()
    assert caught.error == caught.again == "PeerLost"
    assert "rank 1 has ended" in caught.text


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
        while not process_state(int(talk.get("server"))).endswith("ended"):
            time.sleep(0.01)
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
        report(catch(other, other.barrier))
        talk.set("caught/0", "")
    else:
        server = int(talk.get("server"))
        while (
            whole._transport._status._pids[0] != server
            or other._transport._status._pids[0] != server
        ):
            time.sleep(0.01)
        talk.set(f"seen/{comm.rank}", "")
        while "stopped" not in process_state(server):
            time.sleep(0.01)
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


@on_ranks(1, pool="forked")
def test_connecting_to_a_stopped_rank_0_is_an_error(comm: Communicator) -> None:
    """The store's server accepts connections but never answers."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        os.environ |= {"MASTER_PORT": str(stopped.getsockname()[1]), "RANK": "1", "WORLD_SIZE": "2"}
        with pytest.raises(ringdp.CommunicationError, match="the store has given no answer") as e:
            ringdp.init(timeout=TIMEOUT)
    assert "rank 1 cannot reach rank 0's store at 127.0.0.1" in str(e.value)


def test_unknown_transports_and_options_are_refused():
    with pytest.raises(ringdp.UsageError, match="shm, c10d"):
        ringdp.init(transport="tcp")
    with pytest.raises(ringdp.UsageError, match="shared memory only"):
        ringdp.init(transport="c10d", link=Link(0.1, 1e9))
