"""Over gloo: when a rank ends, stalls or errs, every other rank names it.

A sample of what tests/comm checks over shared memory. One job has a communicator for each of
several collectives; the victim, the first or the last rank, fails at the same point of all of them.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from _pytest.mark import ParameterSet

import ringdp
from ringdp import CollectiveMismatch, CommunicationError, Communicator, PeerLost, Work
from ringdp.transport import threads
from ringdp.transport.c10d import wire
from ringdp.transport.store import status
from ringdp.transport.store.processes import process_state
from tests.comm.failing import (
    WHENS,
    Caught,
    Form,
    assert_shows_both_calls,
    catch,
    names_its_line,
)
from tests.comm.test_deaths import ENDS
from tests.comm.test_late import TIMEOUT
from tests.comm.test_mistakes import ELEMENTS, MISTAKES
from tests.forks import CALL_TIMEOUT, Forks, Report, store
from tests.ranks import on_ranks
from tests.waiting import used_asleep, wait_until

pytestmark = pytest.mark.process

FORMS = (Form("all_reduce", "ring"), Form("all_gather", "direct"), Form("broadcast", "binomial"))
SUMS = (Form("reduce", "direct"), Form("all_reduce", "direct"), Form("reduce_scatter", "ring"))
SMALL, LARGE = 1000, 50_000  # elements


def sampled(hows: Iterable[str]) -> list[ParameterSet]:
    """(how, when, ranks, victim): every (how, when) once; the full product is `exhaustive`."""
    pairs = list(product(hows, WHENS))
    quick = {
        (how, when, n, (n - 1) * (i // 2 % 2))
        for i, (how, when) in enumerate(pairs)
        for n in [2 + 2 * (i % 2)]
    }
    return [
        pytest.param(
            *row,
            id="{}-{}-{}-rank{}".format(*row),
            marks=() if row in quick else pytest.mark.exhaustive,
        )
        for row in [(*pair, n, v) for pair in pairs for n in (2, 4) for v in (0, n - 1)]
    ]


def communicators(
    comm: Communicator, count: int, warn_after: float = CALL_TIMEOUT
) -> list[Communicator]:
    """`count` communicators over gloo that have passed their first collective."""
    whole = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT, warn_after=warn_after)
    found = [whole.duplicate() for _ in range(count)]
    for c in found:
        c.barrier()
    comm.barrier()  # otherwise a rank still in a barrier could notice the failure there
    return found


def begin(form: Form, c: Communicator, when: str) -> Work:
    return form.begin(c, torch.ones(LARGE if when == "within" else SMALL))


def meet(comm: Communicator, what: str, without: int) -> None:
    """Returns once every rank except `without` has come here."""
    talk = store()
    talk.set(f"{what}/{comm.rank}", "")
    talk.wait([f"{what}/{r}" for r in range(comm.size) if r != without])


def victim_ends(comm: Communicator, report: Report, how: str, when: str, victim: int) -> None:
    cases = list(zip(FORMS, communicators(comm, len(FORMS)), strict=True))
    works: dict[Form, Work] = {}
    if comm.rank == victim:
        for form, c in cases if when != "before" else ():
            works[form] = begin(form, c, when)
        for work in works.values() if when == "after" else ():
            work.wait()
        ENDS[how][0]()

    def start(form: Form, c: Communicator) -> None:
        works[form] = begin(form, c, when)

    early = {form: catch(c, partial(start, form, c)) for form, c in cases}
    for form, c in cases:
        report(early[form] or catch(c, works[form].wait, c.barrier))
    meet(comm, "caught", without=victim)  # a rank that leaves now would itself be reported lost


@pytest.mark.parametrize(("how", "when", "n", "victim"), sampled(["killed", "raising", "exiting"]))
def test_a_rank_that_ends_is_reported_lost_by_all_others(forks: Forks, how, when, n, victim):
    for rank, (code, reported) in enumerate(forks(n, victim_ends, how, when, victim)):
        assert code == (ENDS[how][1] if rank == victim else 0)
        for form, h in zip(FORMS, reported, strict=True) if rank != victim else ():
            where = f"{form} on rank {rank}: {h}"
            assert h is not None, where
            assert h.error == h.again == "PeerLost", where
            assert names_its_line(h.text), where
            assert h.text.startswith(f"rank {rank} "), where
            assert f"; rank {victim} has ended" in h.text.splitlines()[0], where


def polls(comm: Communicator, report: Report) -> None:
    (c,) = communicators(comm, 1)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
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
    (c,) = communicators(comm, 1)
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
    (c,) = communicators(comm, 1)
    x, send, sent = torch.ones(SMALL + (comm.rank == 2)), wire.sends, threading.Event()

    def late(*arguments: Any) -> list[Work]:
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


def victim_stalls(comm: Communicator, report: Report, how: str, when: str, victim: int) -> None:
    cases, talk = list(zip(FORMS, communicators(comm, len(FORMS)), strict=True)), store()
    pid = comm._transport.record(victim).pid
    if comm.rank == victim:
        works = [begin(form, c, when) for form, c in cases if when != "before"]
        for work in works if when == "after" else ():
            work.wait()
        talk.set("stalls", "")
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        talk.wait([f"caught/{r}" for r in range(comm.size) if r != victim])
        for _, c in cases:
            report(catch(c, c.barrier))
    else:
        works = [begin(form, c, when) for form, c in cases]
        talk.wait(["stalls"])
        while how == "stopped" and "stopped" not in process_state(pid):
            time.sleep(0.01)
        meet(comm, "came", without=victim)
        # A collective that the victim took part in completes, however slow the others are. A rank
        # that only sleeps continues in the background with what it has begun.
        ends = when == "after" or (how, when) == ("sleeping", "within")

        def first(work: Work, c: Communicator) -> Caught | None:
            return catch(c, lambda: work.wait(CALL_TIMEOUT if ends else TIMEOUT))

        def second(c: Communicator, early: Caught | None) -> Caught | None:
            late = partial(c.all_reduce, torch.ones(1), async_op=True)
            return early or catch(c, lambda: late().wait(TIMEOUT))

        comms = [c for _, c in cases]
        with ThreadPoolExecutor(len(cases)) as pool:
            early = list(pool.map(first, works, comms))
            # A rank still in the first call would notice there that another has given up the
            # second.
            meet(comm, "through", without=victim)
            for caught in pool.map(second, comms, early):
                report(caught)
        meet(comm, "caught", without=victim)
        os.kill(pid, signal.SIGCONT)
    meet(comm, "left", without=-1)


@pytest.mark.parametrize(("how", "when", "n", "victim"), sampled(["stopped", "sleeping"]))
def test_a_stalled_rank_is_named_by_all_others(forks: Forks, how, when, n, victim):
    for rank, (code, reported) in enumerate(forks(n, victim_stalls, how, when, victim)):
        assert code == 0
        for form, h in zip(FORMS, reported, strict=True):
            where = f"{form} on rank {rank}: {h}"
            assert h is not None, where
            assert h.error == h.again == "CollectiveTimeout", where
            if rank != victim:
                why = h.text.splitlines()[0].partition("; ")[2]
                stopped = rf"rank {victim} gives no answer \(process \d+ is stopped\)"
                assert re.search(stopped if how == "stopped" else f"rank {victim}", why), where


def mistakes(when: str) -> list[str]:
    """A third of the mistakes, for each `when` another."""
    return list(MISTAKES)[WHENS.index(when) :: len(WHENS)]


def victim_errs(comm: Communicator, report: Report, when: str, victim: int) -> None:
    """The victim makes each mistake on its own communicator, in its first, second or third call."""
    status.PATIENCE = CALL_TIMEOUT  # a busy machine is slow
    chosen = mistakes(when)
    # short, as it is the warning that detects ranks that all wait for one another
    comms = communicators(comm, len(chosen), warn_after=0.2)
    for i, (what, c) in enumerate(zip(chosen, comms, strict=True)):
        form = SUMS[0] if what == "root" else SUMS[i % len(SUMS)]
        for _ in range(WHENS.index(when)):
            form.call(c, torch.ones(ELEMENTS))
        comm.barrier()  # otherwise a rank still in one of these could notice the mistake there
        call = MISTAKES[what if comm.rank == victim else "nothing"]
        report((what, catch(c, lambda call=call, form=form, c=c: call(form.call, c), c.barrier)))
    meet(comm, "left", without=-1)


@pytest.mark.parametrize(
    ("n", "when", "victim"), [(4, "before", 3), (2, "within", 1), (4, "after", 0)]
)
def test_a_mismatch_is_reported_on_all_ranks_with_both_lines(forks: Forks, n, when, victim):
    for rank, (code, reported) in enumerate(forks(n, victim_errs, when, victim)):
        assert code == 0
        assert [what for what, _ in reported] == mistakes(when)
        for what, h in reported:
            where = f"{what} on rank {rank}: {h}"
            if what == "nothing":
                assert h is None, where
                continue
            assert h.error == h.again == "CollectiveMismatch", where
            assert_shows_both_calls(h.text, victim, where)
