"""A rank dies, in any way and at any time: within a second every other rank names it.

One job has a communicator for each collective; the victim, the first (the root) or the last rank,
dies at the same point of all of them.
"""

from __future__ import annotations

import os
import re
import sys
import time
from functools import partial

import pytest
import torch

from ringdp import Communicator, Work
from tests.comm.failing import Form, catch, duplicates, matrix, names_its_line, row_of
from tests.forks import CALL_TIMEOUT, Forks, Report, die, meet

pytestmark = pytest.mark.process

SMALL, LARGE = 1000, 50_000  # elements; a large collective takes milliseconds
ALLOWED = CALL_TIMEOUT / 3  # seconds; takes 0.01 s on an idle machine, but must not be a timeout


def raise_error() -> None:
    sys.excepthook = lambda *_: None  # keep the traceback out of the tests' output
    raise RuntimeError("a bug of the user's")


def exit_with_7() -> None:
    sys.exit(7)


def exit_at_once() -> None:
    os._exit(9)


ENDS = {
    "killed": (die, -9),
    "raising": (raise_error, 1),
    "exiting": (exit_with_7, 7),
    "vanishing": (exit_at_once, 9),
}


def victim_ends(
    comm: Communicator,
    report: Report,
    transport: str,
    how: str,
    when: str,
    victim: int,
    asked: list[Form],
) -> None:
    cases = list(zip(asked, duplicates(comm, transport, len(asked)), strict=True))
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
    meet(comm, "caught", without=victim)  # a rank that leaves now would itself be reported lost


@pytest.mark.parametrize(("transport", "how", "when", "n", "victim", "asked"), matrix(ENDS))
def test_a_rank_that_dies_is_reported_lost_by_all_others(
    forks: Forks, transport, how, when, n, victim, asked
):
    ended = forks(n, victim_ends, transport, how, when, victim, asked)
    code, (died,) = ended[victim]
    assert code == ENDS[how][1]
    after: list[float] = []
    for rank in set(range(n)) - {victim}:
        code, reported = ended[rank]
        assert code == 0
        assert [form for form, _ in reported] == asked
        for form, h in reported:
            assert h is not None, f"{form} raised no error"
            assert h.error == h.again == "PeerLost", h
            assert names_its_line(h.text), h
            assert h.text.startswith(f"rank {rank} "), h
            assert f"; rank {victim} has ended (" in h.text.splitlines()[0], h
            row = row_of(victim, h.text)
            assert "has ended" in row or "it has closed" in row, h
            if (transport, when) == ("shm", "before"):  # whose records outlive their ranks
                assert "user code" in row, h
                assert re.search(r"barrier #0 at .*/failing.py:", row), h
            elif (transport, when) == ("shm", "after"):
                assert f"{form.name} #1 (" in row, h
            assert h.at - died < ALLOWED, h
            after.append(h.at - died)
    where = f"{n} ranks over {transport}"
    print(f"{how} {when}, {where}: reported {min(after):.4f} to {max(after):.4f} s later")
