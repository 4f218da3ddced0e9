"""However the ranks of a job end, there is no hang, no zombie, and nothing left in shared
memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.cli.loopback import environment, loopback_store
from ringdp.transport.records import CLOSED
from tests.forks import Forks, Report, die, store
from tests.limits import no_descriptor
from tests.ranks import on_ranks
from tests.waiting import wait_until

pytestmark = pytest.mark.process


def after_large_collectives(comm: Communicator, report: Report) -> None:
    """The other ranks may still be reading the result."""
    x = torch.ones(2_000_000)
    for _ in range(3):
        comm.all_reduce(x)
    sys.exit()


def with_a_collective_pending(comm: Communicator, report: Report) -> None:
    if comm.rank == 0:
        comm.all_reduce(torch.ones(9), async_op=True)
        time.sleep(0.1)
    sys.exit()


def with_communicators_in_a_cycle(comm: Communicator, report: Report) -> None:
    cycle: list[object] = []
    cycle.append((cycle, comm.duplicate(), comm.duplicate()))
    comm.barrier()
    sys.exit()


def with_an_exit_code(comm: Communicator, report: Report) -> None:
    comm.barrier()
    sys.exit(3)


def all_killed(comm: Communicator, report: Report) -> None:
    comm.barrier()
    die()


def after_an_error(comm: Communicator, report: Report) -> None:
    comm.barrier()
    if comm.rank == 1:
        die()
    try:
        comm.barrier()
    except ringdp.PeerLost:
        sys.exit(4)


ENDS: dict[Callable[[Communicator, Report], None], list[int]] = {
    after_large_collectives: [0, 0, 0],
    with_a_collective_pending: [0, 0, 0],
    with_communicators_in_a_cycle: [0, 0, 0],
    with_an_exit_code: [3, 3, 3],
    all_killed: [-9, -9, -9],
    after_an_error: [4, -9, 4],
}


@pytest.mark.parametrize("end", ENDS)
def test_ranks_end_and_leave_no_shared_memory(forks: Forks, end):
    before = set(os.listdir("/dev/shm"))
    assert [code for code, _ in forks(3, end)] == ENDS[end]
    assert not {f for f in set(os.listdir("/dev/shm")) - before if "ringdp" in f}


@on_ranks(2, pool="forked")
def test_closing_without_a_free_descriptor_loses_no_data(comm: Communicator) -> None:
    """While the other rank has not yet received the data."""
    x = torch.ones(9)
    if comm.rank == 0:
        comm.broadcast(x, algorithm="binomial")
        try:
            with no_descriptor():
                comm.close()
        finally:
            store().set("closed", "")
    else:
        store().wait(["closed"])
        comm.broadcast(x, algorithm="binomial")


WAITING = """
import torch, torch.distributed as dist
import ringdp

dist.init_process_group("ringdp")
groups = [dist.new_group() for _ in range(8)]
x = torch.ones(9)
with ringdp.init(transport="c10d") as closed:
    closed.send(x, 1) if closed.rank == 0 else closed.recv(x)
comm = ringdp.init(transport="c10d")
comm.barrier()
if comm.rank == 0:
    message = comm.irecv(x.clone(), 1)
    futures = [dist.all_reduce(x.clone(), group=g, async_op=True).get_future() for g in groups]
"""


DAEMONS = """
import threading, time
import torch
import ringdp
from ringdp.transport import threads
from ringdp.transport.store.processes import has_ended

threading.excepthook = lambda _: None
comms = [ringdp.init() for _ in range(8)]
pid = comms[0]._transport.record(0).pid
comms[0].barrier()

def receive(comm):
    try:
        comm.recv(torch.ones(9), 1)
    finally:
        torch.ones(4_000_000).sin_()  # it comes back to Python from here, too

if comms[0].rank == 0:
    for comm in comms:
        threading.Thread(target=receive, args=(comm,), daemon=True).start()
    while len(threads._waits) < len(comms):
        time.sleep(0.01)
while comms[0].rank == 1 and not has_ended(pid):  # an earlier end would end rank 0's calls
    time.sleep(0.01)
"""


@pytest.mark.parametrize("text", [WAITING, DAEMONS], ids=["ours", "users"])
def test_threads_in_calls_do_not_abort_the_exit(tmp_path, text: str):
    """Threads that wait for messages or futures, and a user's daemon threads in a call, would
    otherwise abort the process while it exits."""
    script = tmp_path / "waiting.py"
    script.write_text(text, encoding="utf-8")
    store = loopback_store()
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | environment(store.port, 2, rank),
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    try:
        ended = [(process.communicate(timeout=600)[1], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [code for _, code in ended] == [0, 0], ended


@on_ranks(2)
def test_two_threads_may_close_at_once(comm: Communicator) -> None:
    """As when one aborts while another leaves the communicator's block. Both return once the
    transport's own threads have ended."""
    for _ in range(20):
        other = comm.duplicate()
        closed = list[int]()

        def close() -> None:
            other._transport.close()  # noqa: B023
            record = other._transport.record(comm.rank)  # noqa: B023
            assert record is not None
            closed.append(record.pid)  # noqa: B023

        if comm.rank == 0:
            other.all_reduce(torch.ones(1 << 16), async_op=True)
            other.irecv(torch.ones(1 << 16), 1)
            for _ in range(2):
                threading.Thread(target=close, daemon=True).start()
            wait_until(lambda: len(closed) == 2, 20)  # noqa: B023
            assert closed == [CLOSED, CLOSED]
        comm.barrier()
        other.abort()
