"""A rank is stopped, or sleeps in user code: every other rank gets a timeout that names it.

One job has a communicator for each collective; the victim, the first (the root) or the last rank,
stalls at the same point of all of them.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ringdp
from ringdp import Communicator, Work
from ringdp.comm.table import table
from ringdp.transport.store import status
from ringdp.transport.store.processes import process_state
from tests.comm.failing import Caught, Form, catch, duplicates, matrix, names_its_line, row_of
from tests.forks import CALL_TIMEOUT, Forks, Report, meet, store
from tests.ranks import on_ranks
from tests.waiting import wait_until

pytestmark = pytest.mark.process

TIMEOUT = 0.3  # seconds


STALLS = ("stopped", "sleeping")


def victim_stalls(
    comm: Communicator,
    report: Report,
    transport: str,
    how: str,
    when: str,
    victim: int,
    asked: list[Form],
) -> None:
    if how == "sleeping":
        status.PATIENCE = CALL_TIMEOUT  # all ranks answer, however slow they are
    comms = dict(zip(asked, duplicates(comm, transport, len(asked)), strict=True))
    pid = comm._transport.record(victim).pid

    def begin(form: Form) -> Work:
        return form.begin(comms[form], torch.ones(50_000 if when == "within" else 1000))

    def first(form: Form) -> Caught | None:
        # A sleeping rank continues in the background what it has begun, and a stopped rank may have
        # done its part. Then the call completes, however slow the others are.
        record = comms[form]._transport.record(victim)  # None over gloo
        done = when == "after" or (record is not None and record.finished > 1)
        ends = done or (how, when) == ("sleeping", "within")
        return catch(comms[form], lambda: works[form].wait(CALL_TIMEOUT if ends else TIMEOUT))

    def second(form: Form) -> Caught | None:
        c, x = comms[form], torch.ones(1)
        return catch(c, lambda: c.all_reduce(x, async_op=True).wait(TIMEOUT))

    if comm.rank == victim:
        works = {form: begin(form) for form in comms if when != "before"}
        for work in works.values() if when == "after" else ():
            work.wait()
        talk = store()
        talk.set(f"came/{victim}", "")
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        talk.wait([f"caught/{rank}" for rank in range(comm.size) if rank != victim])
        for form, c in comms.items():
            report((form, catch(c, c.barrier)))
    else:
        works = {form: begin(form) for form in comms}
        # A slow rank must not look late: it could notice the others' timeout when it begins its
        # call.
        meet(comm, "came")
        if how == "stopped":
            wait_until(lambda: "stopped" in process_state(pid), CALL_TIMEOUT)
        with ThreadPoolExecutor(len(comms)) as pool:
            early = dict(zip(comms, pool.map(first, comms), strict=True))
            # A rank still in its first call could notice there that another has given up the
            # second.
            meet(comm, "through", without=victim)
            late = [form for form in comms if early[form] is None]
            caught = early | dict(zip(late, pool.map(second, late), strict=True))
        for form in comms:
            report((form, caught[form]))
        meet(comm, "caught", without=victim)
        os.kill(pid, signal.SIGCONT)
    comm.barrier()  # a rank that leaves earlier would be lost to the victim


@pytest.mark.parametrize(("transport", "how", "when", "n", "victim", "asked"), matrix(STALLS))
def test_a_stalled_rank_is_named_by_all_others(
    forks: Forks, transport, how, when, n, victim, asked
):
    ended = forks(n, victim_stalls, transport, how, when, victim, asked)
    for rank, (code, reported) in enumerate(ended):
        assert code == 0
        assert [form for form, _ in reported] == asked
        for form, h in reported:
            where = f"{form} on rank {rank}: {h}"
            assert h is not None, where
            assert h.error == h.again == "CollectiveTimeout", where
            if rank == victim:
                continue
            assert names_its_line(h.text), where
            assert h.text.startswith(f"rank {rank} "), where
            assert f"rank {victim}" in h.text.splitlines()[0].partition("; ")[2], where
            row = row_of(victim, h.text)
            assert (" is stopped" in row) == (how == "stopped"), where
            if when == "before" and (transport, how) != ("c10d", "stopped"):  # which cannot tell
                assert "user code" in row, where
                assert re.search(r"barrier #0 at .*/failing.py:", row), where


def wait_for_a_message(comm: Communicator, report: Report) -> None:
    x, talk = torch.ones(10), store()
    if comm.rank == 0:
        comm.recv(x, 1, tag=7)
    elif comm.rank == 1:
        talk.wait(["shown"])
        comm.send(x, 0, tag=7)
    else:
        while comm._transport.message(0) is None:
            time.sleep(0.01)
        report(table(comm._transport))
        talk.set("shown", "")
    comm.barrier()
    report(table(comm._transport))


def test_the_table_shows_a_rank_that_waits_for_a_message(forks: Forks):
    *_, (code, (during, after)) = forks(3, wait_for_a_message)
    assert code == 0
    row = during.splitlines()[1].split(None, 1)[1]
    assert re.match(r"recv #0 \(float32, from rank 1\) of 10 +7 +rank 1 +", row), during
    assert "/test_late.py:" in row
    assert "recv" not in after


@on_ranks(2, pool="forked")
def test_a_stall_is_warned_of_once_with_the_missing_rank(comm: Communicator) -> None:
    warnings: list[str] = []
    talk = store()

    def collect(text: str) -> None:
        warnings.append(text)
        if comm.rank == 0:  # set once more if there is a second warning
            threading.Timer(0.3, talk.set, ("warned", "")).start()

    handler = logging.Handler()
    handler.emit = lambda record: collect(record.getMessage())  # type: ignore[method-assign]
    with ringdp.init(timeout=CALL_TIMEOUT, warn_after=0.1) as other:
        other.barrier()  # collective 0
        logging.getLogger("ringdp").addHandler(handler)
        if comm.rank == 1:
            talk.wait(["warned"])
        work = other.all_reduce(torch.ones(10), async_op=True)
        # the late rank does not wait, so it must not warn
        while comm.rank == 1 and not work.is_completed():
            time.sleep(0.001)
        work.wait()
        comm.barrier()
    if comm.rank == 1:
        assert not warnings
        return
    (text,) = warnings
    assert re.match(r"rank 0 has waited \d+\.\d s for all_reduce #1 \(float32, sum\) of 10 ", text)
    assert "/test_late.py:" in text.splitlines()[0]
    assert "; rank 1 has not called it\nrank  is in " in text


@on_ranks(3)
def test_uneven_parts_are_no_mismatch_while_waiting(comm: Communicator) -> None:
    """Ranks that send each other different amounts, while one is late."""
    me, n = comm.rank, comm.size
    sent = [10 * (me + r) for r in range(n)]
    sent_data = torch.cat([torch.full((k,), float(me)) for k in sent])
    if me == 0:
        time.sleep(0.4)
    out = torch.empty_like(sent_data)
    comm.all_to_all_v(out, sent_data, sent, sent)
    assert torch.equal(out, torch.cat([torch.full((k,), float(r)) for r, k in enumerate(sent)]))


@on_ranks(2, pool="forked")
def test_a_completed_call_does_not_raise_a_later_failure(comm: Communicator) -> None:
    """Rank 0 is stopped in a broadcast; rank 1 completes it, then gives up another call."""
    x = torch.full((4,), float(comm.rank))
    comm.barrier()
    if comm.rank == 0:
        comm.broadcast(x, root=1)
        assert x.tolist() == [1.0] * 4
        return
    first, late = comm._transport, torch.ones(1)
    while first.record(0).begun == first.record(1).begun or first.record(0).waits_for != 1:
        time.sleep(0.01)
    pid = first.record(0).pid
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: "stopped" in process_state(pid), CALL_TIMEOUT)
    try:
        comm.broadcast(x, root=1)
        with pytest.raises(ringdp.CollectiveTimeout):
            comm.all_reduce(late, async_op=True).wait(TIMEOUT)
    finally:
        os.kill(pid, signal.SIGCONT)


@on_ranks(2, pool="forked")
def test_the_table_shows_a_wait_in_another_communicator(comm: Communicator) -> None:
    """Each rank waits in another communicator, and they give up in turn."""
    for turn in range(2):
        both = [comm.duplicate() for _ in range(2)]
        mine, others = both[comm.rank], both[1 - comm.rank]
        work = mine.all_reduce(torch.ones(5), async_op=True, tag=comm.rank)
        while mine._transport.record(comm.rank).begun == 0:
            time.sleep(0.01)
        meet(comm, f"came/{turn}")
        if comm.rank == turn:
            h = catch(mine, lambda work=work: work.wait(TIMEOUT))
            others.all_reduce(torch.ones(5), tag=1 - comm.rank)
        else:
            work.wait()
        comm.barrier()
        for c in both:
            c.close()
    assert h.error == "CollectiveTimeout"
    found = row_of(1 - comm.rank, h.text)
    doing = "user code, or all_reduce #0 (float32, sum) of 5 of another communicator"
    assert doing in found, h.text
    assert "/test_late.py:" in found, h.text
    assert "user code" not in row_of(comm.rank, h.text)
