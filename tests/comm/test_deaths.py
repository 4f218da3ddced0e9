"""A rank dies, in any way and at any time: within a second every other rank names it.

One job has a communicator for each collective; the victim, the first (the root) or the last rank,
dies at the same point of all of them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from functools import partial

import pytest
import torch

from ringdp import Communicator, Work
from tests.comm.failing import Form, catch, forms, matrix, names_its_line, row_of
from tests.forks import CALL_TIMEOUT, Forks, Report

pytestmark = pytest.mark.process

SMALL, LARGE = 1000, 50_000  # elements; a large collective takes milliseconds
ALLOWED = CALL_TIMEOUT / 3  # seconds; takes 0.01 s on an idle machine, but must not be a timeout


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    sys.excepthook = lambda *_: None  # keep the traceback out of the tests' output
    raise RuntimeError("a bug of the user's")


def exit_with_7() -> None:
    sys.exit(7)


def exit_at_once() -> None:
    os._exit(9)


ENDS = {
    "killed": (kill, -9),
    "raising": (raise_error, 1),
    "exiting": (exit_with_7, 7),
    "vanishing": (exit_at_once, 9),
}


def victim_ends(
    comm: Communicator, report: Report, how: str, when: str, victim: int, turn: int | None
) -> None:
    cases = [(form, comm.duplicate()) for form in forms(turn)]
    for _, c in cases:
        c.barrier()  # collective 0
    comm.barrier()  # otherwise a rank still in one could notice the death there
    x = torch.ones(LARGE if when == "within" else SMALL)
    works: dict[Form, Work] = {}

    def begin(form: Form, c: Communicator) -> None:
        works[form] = form.begin(c, x.clone())

    if comm.rank == victim:
        for form, c in cases if when != "before" else ():
            begin(form, c)
        for work in works.values() if when == "after" else ():
            work.wait()
        report(time.monotonic())
        ENDS[how][0]()
    early = {form: catch(c, partial(begin, form, c)) for form, c in cases}
    for form, c in cases:
        report((form, early[form] or catch(c, works[form].wait, c.barrier)))


@pytest.mark.parametrize(("how", "when", "n", "victim", "turn"), matrix(ENDS))
def test_a_rank_that_dies_is_reported_lost_by_all_others(forks: Forks, how, when, n, victim, turn):
    ended = forks(n, victim_ends, how, when, victim, turn)
    code, (died,) = ended[victim]
    assert code == ENDS[how][1]
    after: list[float] = []
    for rank in set(range(n)) - {victim}:
        code, reported = ended[rank]
        assert code == 0
        assert [form for form, _ in reported] == forms(turn)
        for form, h in reported:
            assert h is not None, f"{form} raised no error"
            assert h.error == h.again == "PeerLost", h
            assert names_its_line(h.text), h
            assert h.text.startswith(f"rank {rank} "), h
            assert f"; rank {victim} has ended (" in h.text.splitlines()[0], h
            row = row_of(victim, h.text)
            assert "has ended" in row or "it has closed" in row, h
            if when == "before":
                assert "user code" in row, h
                assert re.search(r"barrier #0 at .*/test_deaths.py:", row), h
            elif when == "after":
                assert f"{form.name} #1 (" in row, h
            assert h.at - died < ALLOWED, h
            after.append(h.at - died)
    print(f"{how} {when}, {n} ranks: reported {min(after):.4f} to {max(after):.4f} s later")
