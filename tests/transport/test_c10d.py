"""The transport over torch.distributed: the simulator's bits, what it offers, and how it fails."""

from __future__ import annotations

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
from ringdp import Communicator
from ringdp.comm import rendezvous
from ringdp.comm.rendezvous import over
from ringdp.transport.base import Link
from ringdp.transport.store import failures
from ringdp.transport.store.processes import process_state
from tests.comm import test_messages
from tests.comm.failing import Heard, hear, held
from tests.comm.test_late import TIMEOUT
from tests.forks import CALL_TIMEOUT, Ended, Forks, Report, store
from tests.ports import CONNECTED, sockets, unused_port
from tests.ranks import on_ranks
from tests.transport.offered import offered
from tests.transport.test_conformance import ROWS, Case, agree

pytestmark = pytest.mark.process

LENGTHS = (0, 1, 7, 1003)
DTYPES = ("float32", "bfloat16", "int16", "bool")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_algorithm_gives_the_simulators_bits(over_gloo, n: int):
    cases = [
        Case(*row, LENGTHS[(i + k + n) % 4], DTYPES[(i + 3 * k) % 4])
        for k in (0, 1)
        for i, row in enumerate(ROWS)
    ]
    cases += [Case("all_reduce", "direct", 50_000 + n, d) for d in DTYPES]
    agree(over_gloo(n), n, cases)


@pytest.mark.parametrize("n", [2, 3])
@on_ranks(pool="over_gloo")
def test_it_offers_what_a_communicator_has(comm: Communicator) -> None:
    offered(comm)
    test_messages.any_order(comm, 3)
    test_messages.short_ones_need_no_receiver(comm)
    with pytest.raises(ringdp.UsageError, match="tags are 0"):
        comm.send(torch.zeros(1), (comm.rank + 1) % comm.size, tag=1 << 30)
    with pytest.raises(ringdp.UsageError, match="CPU"):
        comm.all_reduce(torch.zeros(1, device="meta"))


@on_ranks(3)
def test_over_any_group(comm: Communicator) -> None:
    if not dist.is_initialized():  # as another test may have left it
        store = dist.PrefixStore(f"of_a_group/{comm.issued}", comm._connect.args[0])
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
            dist.barrier(group)  # else a rank that is done would be lost to one that is not
            parts.close()
    comm.barrier()
    dist.destroy_process_group()


def mistaken(comm: Communicator) -> Heard | None:
    """Of collectives tests/transport/test_c10d_failures.py asks."""
    x = torch.ones(5000)
    act = (lambda: comm.recv(x[1:], 0)) if comm.rank else (lambda: comm.send(x, 1))
    return hear(comm, act, comm.barrier, comm.barrier)


def test_a_message_of_another_length_is_a_mismatch_on_both(over_gloo):
    for heard in over_gloo(2)(mistaken):
        assert heard.error == heard.again == "CollectiveMismatch", heard
        assert "expected 19996 bytes of float32 with tag 0 from rank 0" in heard.text


def killed(comm: Communicator) -> list[Heard | None]:
    c = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT)
    others = [c.duplicate() for _ in range(2)]
    c.barrier()
    comm.barrier()  # who were still in the other one might hear of the death there
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(5000)
    a, b = others
    calls = (lambda: c.all_reduce(x), c), (lambda: a.recv(x), a), (lambda: b.recv(x, 1), b)
    return [hear(on, call) for call, on in calls]


def test_a_killed_rank_is_named_on_every_other(fresh_ranks):
    said = fresh_ranks(3).outcomes(killed)
    assert said[1] is None
    for rank in (0, 2):
        for heard in said[rank]:
            assert heard.error == heard.again == "PeerLost", heard
            assert "rank 1 has ended" in heard.text


def waits_for_another(comm: Communicator, report: Report) -> None:
    """Rank 2 is killed, where rank 0 waits for rank 1, which is in the user's code."""
    c, talk = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT), store()
    c.barrier()
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1:
        talk.wait(["heard"])
    report(hear(c, lambda: c.broadcast(torch.ones(10), 1)))
    talk.set("heard", "")
    talk.wait(["heard"])


def test_a_death_is_heard_by_who_waits_for_another_rank(forks: Forks):
    here, there, (code, _) = forks(3, waits_for_another)
    assert code == -signal.SIGKILL
    for code, (heard,) in (here, there):
        assert code == 0
        assert heard.error == heard.again == "PeerLost", heard
        assert "; rank 2 has ended (process" in heard.text


def leaves(comm: Communicator) -> Heard | None:
    """Rank 1 closes where the others still count on it."""
    c = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT)
    rendezvous._world = comm
    c.barrier()
    comm.barrier()
    if comm.rank == 1:
        c.close()
        comm.barrier()
        return None
    heard = hear(c, c.barrier)
    comm.barrier()
    c.close()
    return heard


def test_a_rank_that_closes_is_lost_to_the_others(ranks):
    here, left, there = ranks(3)(leaves)
    assert left is None
    for heard in (here, there):
        assert heard.error == heard.again == "PeerLost"
        assert "rank 1 has ended" in heard.text


def rank_0_serves(comm: Communicator) -> Any:
    """From now on the job's store, as long as it lives. The launcher's, which has its pid."""
    talk = store()
    if comm.rank == 0:
        talk.set("port", str(unused_port()))
        talk.set("server", str(os.getpid()))
    os.environ["MASTER_PORT"] = talk.get("port").decode()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return talk


def server_ends_first(comm: Communicator, report: Report) -> None:
    """Without a launcher's store, which is one that rank 0 serves, as long as it lives."""
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
        time.sleep(2 * failures.LOOK)  # who listens looks
    whole.close()
    other.close()
    report("closed")


def test_a_rank_0_that_ends_first_with_its_store_is_no_loss(forks: Forks):
    for code, said in forks(3, server_ends_first):
        assert (code, said) == (0, ["closed"])


def server_stops(comm: Communicator, report: Report, transport: str) -> None:
    """The same, where rank 0 is stopped for a while, and with it the store."""
    talk = rank_0_serves(comm)
    whole = ringdp.init(transport=transport, timeout=CALL_TIMEOUT)
    other = whole.duplicate()
    for c in (whole, other):
        c.barrier()
    if comm.rank == 0:
        while not talk.check([f"seen/{r}" for r in (1, 2)]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
        report(hear(other, other.barrier))
        talk.set("heard/0", "")
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
        report(hear(whole, lambda: whole.all_reduce(torch.ones(1), async_op=True).wait(TIMEOUT)))
        other.set_timeout(TIMEOUT)
        report(hear(other, other.duplicate))
        talk.set(f"heard/{comm.rank}", "")
        talk.wait([f"heard/{r}" for r in (1, 2)])
        os.kill(server, signal.SIGCONT)
    talk.wait([f"heard/{r}" for r in range(comm.size)])
    comm.barrier()


def test_a_rank_0_that_is_stopped_with_its_store_is_late(forks: Forks):
    is_late(forks(3, server_stops, "c10d"))


def is_late(ended: list[Ended]) -> None:
    (code, (there,)), *others = ended
    assert (code, there.error) == (0, "CollectiveTimeout"), there
    for code, said in others:
        assert code == 0
        for heard in said:
            assert heard.error == heard.again == "CollectiveTimeout", heard
            assert re.search(r"; rank 0 gives no answer \(process \d+ is stopped\)", heard.text)


def gone_again(comm: Communicator, transport: str, closes: bool) -> None:
    """What has come with communicators goes with them, though each rank has watched the others."""
    with ringdp.init(transport=transport, timeout=CALL_TIMEOUT) as whole:
        rendezvous._world = comm
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
        until = time.monotonic() + CALL_TIMEOUT
        while held() - before or set(threading.enumerate()) - running:
            assert time.monotonic() < until, (held() - before, threading.enumerate())
            time.sleep(0.01)
        comm.barrier()


def connections(comm: Communicator) -> int:
    """How many to the job's store one more communicator makes: a name server is asked for each."""
    port = f":{int(os.environ['MASTER_PORT']):04X}"

    before = set(sockets(CONNECTED))
    with comm.duplicate() as other:
        other.barrier()
        made = set(sockets(CONNECTED)) - before
    return sum(there.endswith(port) for _, there in made)


@pytest.mark.parametrize("pool", ["over_gloo", "over_nccl", "over_peer"])
def test_a_communicator_makes_one_connection_to_the_store(request, pool: str):
    assert request.getfixturevalue(pool)(2)(connections) == [1, 1]


@pytest.mark.parametrize("closes", [False, True])
def test_nothing_stays_of_one_that_is_closed_or_dropped(ranks, closes: bool):
    ranks(2)(gone_again, "c10d", closes)


def comes_to_a_stopped_store(comm: Communicator, report: Report) -> None:
    """Whose server takes connections, and gives no answer."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        os.environ |= {"MASTER_PORT": str(stopped.getsockname()[1]), "RANK": "1", "WORLD_SIZE": "2"}
        with pytest.raises(ringdp.CommunicationError, match="the store has given no answer") as e:
            ringdp.init(timeout=TIMEOUT)
    report(str(e.value))


def test_a_stopped_rank_0_is_an_error_to_who_comes(forks: Forks):
    ((code, (text,)),) = forks(1, comes_to_a_stopped_store)
    assert code == 0
    assert "rank 1 cannot reach rank 0's store at 127.0.0.1" in text


def test_what_it_does_not_know_it_refuses():
    with pytest.raises(ringdp.UsageError, match="shm, c10d"):
        ringdp.init(transport="tcp")
    with pytest.raises(ringdp.UsageError, match="shared memory only"):
        ringdp.init(transport="c10d", link=Link(0.1, 1e9))
