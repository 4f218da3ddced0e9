"""How ranks find each other through torchrun's variables, and which wrong variables are refused."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from datetime import timedelta
from unittest.mock import Mock

import numpy as np
import pytest
import torch.distributed as dist

import ringdp
from ringdp import CommunicationError, Communicator
from ringdp.cli.loopback import environment, loopback_store
from ringdp.comm import store
from ringdp.comm.rendezvous import _await_group, over
from tests.comm.test_groups import total
from tests.forks import CALL_TIMEOUT
from tests.ports import LISTENING, sockets, unused_port
from tests.ranks import on_ranks
from tests.transport.test_store_client import Stopped

pytestmark = pytest.mark.process
SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's address


@on_ranks(3)
def test_torch_groups_may_reuse_a_name_for_other_ranks(comm: Communicator) -> None:
    """torch numbers its groups, and starts again after destroy_process_group."""
    if dist.is_initialized():  # left initialized by an earlier test
        dist.destroy_process_group()
    for phase, members in enumerate(([0, 1], [1, 2])):
        part = dist.PrefixStore(f"groups/{comm.issued}/{phase}", comm._connect.store)
        dist.init_process_group("gloo", store=part, rank=comm.rank, world_size=comm.size)
        limit = timedelta(seconds=70 + phase)
        group = dist.new_group(members, limit, ("gloo", "ringdp")[phase])
        for _ in range(2):
            if comm.rank in members:
                with over(group) as made:
                    assert total(made, 1) == len(members)
                    assert made.timeout == 70 + phase
                    dist.barrier(group)
        dist.barrier()
        dist.destroy_process_group()
        comm.barrier()


class Gone(dist.HashStore):
    """A store whose server has ended."""

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("connection reset")


@pytest.mark.parametrize(
    ("kind", "why", "timeout"),
    [
        (Gone, "connection reset", CALL_TIMEOUT),
        (Stopped, "the store has given no answer", 0.05),
    ],
)
def test_a_group_whose_store_does_not_answer_is_a_communication_error(kind, why, timeout):
    """As when rank 0, which serves it, has ended or is stopped."""
    there = kind()
    group = Mock(group_name="some", **{"rank.return_value": 1, "size.return_value": 2})
    with pytest.raises(CommunicationError, match=f"rank 1 of 2 waited .* 'some'; .*: {why}"):
        _await_group(group, there, timeout)
    if kind is Stopped:
        there.goes_on.set()


def connect_to_two_stores(comm: Communicator, port: int) -> None:
    for _ in range(2):
        with ringdp.init(timeout=comm.timeout) as again:
            assert total(again, 1) == 2
            comm.barrier()
        os.environ["MASTER_PORT"] = str(port)


def test_communicators_are_numbered_per_store(forked):
    other = loopback_store()
    forked(2)(connect_to_two_stores, other.port)


@pytest.mark.parametrize("serve", ["init", "launcher"])
def test_our_stores_listen_only_on_the_loopback(serve):
    before = sockets(LISTENING)
    if serve == "init":
        here = store._Place(0, 1, "127.0.0.1", unused_port())
        serving, again = (store._serve(here, timedelta(seconds=CALL_TIMEOUT)) for _ in range(2))
        again.set("one server", "for both")
        assert serving.get("one server") == b"for both"
    else:
        serving = loopback_store()
    ((address, _),) = set(sockets(LISTENING)) - set(before)
    assert address == f"0100007F:{serving.port:04X}"


def test_gloo_uses_the_loopback_between_ranks_that_we_start() -> None:
    """Given no interface, it would look up the host's name for every communicator."""
    name = environment(unused_port(), 2)["GLOO_SOCKET_IFNAME"].encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
        found = fcntl.ioctl(some, SIOCGIFADDR, struct.pack("40s", name))
    assert socket.inet_ntoa(found[20:24]) == "127.0.0.1"


@pytest.fixture
def launched(monkeypatch):
    """launched(RANK="1"): sets torchrun's variables, with these changed."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

    def launched(**others: str) -> None:
        for name, value in (variables | others).items():
            monkeypatch.setenv(name, value)

    return launched


@pytest.mark.parametrize(
    ("rank", "agent", "serves"),
    [("0", "True", False), ("0", "False", True), ("1", "False", False), ("1", "True", False)],
)
def test_rank_0_serves_the_jobs_store_unless_torchruns_agent_does(
    launched, monkeypatch, rank: str, agent: str, serves: bool
):
    asked = list[bool]()

    def server(place: store._Place, limit: timedelta, *, serves: bool) -> dist.Store:
        asked.append(serves)
        return dist.HashStore()

    monkeypatch.setattr(store, "_server", server)
    monkeypatch.setattr(store, "_stores", {})
    launched(RANK=rank, TORCHELASTIC_USE_AGENT_STORE=agent)
    store.job_store(CALL_TIMEOUT)
    assert asked == [serves]


def test_an_unreachable_store_is_a_communication_error(launched):
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        launched(RANK="1", MASTER_PORT=str(port))
        where = f"rank 1 cannot reach rank 0's store at 127.0.0.1:{port}"
        with pytest.raises(ringdp.CommunicationError, match=where):
            ringdp.init(timeout=0.5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "first", "RANK is 'first'; allowed: a whole number"),
        ("RANK", "-1", "RANK is '-1'; allowed: a whole number"),
        ("RANK", "2", "RANK is 2; WORLD_SIZE is 2"),
        ("WORLD_SIZE", "2.0", "WORLD_SIZE is '2.0'; allowed: a whole number"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http'; allowed: a whole number"),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536; allowed: 0..65535"),
    ],
)
def test_malformed_torchrun_variables_are_refused(launched, name, value, message):
    launched(**{name: value})
    with pytest.raises(ringdp.UsageError, match=re.escape(message)):
        ringdp.init()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_incomplete_torchrun_variables_are_refused(launched, monkeypatch, missing):
    launched()
    monkeypatch.delenv(missing)
    with pytest.raises(ringdp.UsageError, match=missing):
        ringdp.init()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout": -1}, "timeout is -1; allowed: seconds, above 0"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"timeout": timedelta(seconds=3)}, "timeout is datetime"),
        ({"warn_after": 0}, "warn_after is 0; allowed: seconds above 0"),
        ({"timeout": 1 << 70}, "below 1e13"),
        ({"timeout": "3"}, "timeout is '3'"),
        ({"warn_after": None}, "warn_after is None"),
        ({"transport": ["shm"]}, "transport is ['shm']; allowed: shm"),
        ({"link": ringdp.Link(latency=-1, bandwidth=1e9)}, "link: latency is -1; allowed: seconds"),
        ({"link": ringdp.Link(latency=0, bandwidth=0)}, "bytes/s above 0"),
        ({"link": ringdp.Link(None, 1e9)}, "link: latency is None"),  # type: ignore[arg-type]
        ({"link": ringdp.Link(0, "1e9")}, "link: bandwidth is '1e9'"),  # type: ignore[arg-type]
        ({"link": (1e-3, 1e9)}, "allowed: ringdp.Link"),
    ],
)
def test_wrong_arguments_of_init_are_refused(arguments, message):
    with pytest.raises(ringdp.UsageError, match=re.escape(message)):
        ringdp.init(**arguments)


def test_numbers_of_numpy_are_accepted_as_seconds():
    link = ringdp.Link(np.float32(0), np.int64(10**9))
    with ringdp.init(timeout=np.int64(60), warn_after=np.float32(5), link=link) as comm:
        comm.barrier()
        assert comm.timeout == 60
