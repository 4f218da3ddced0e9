"""A rank that dies, however and whenever: within a second, every other rank says which one.

One job has a communicator for each collective, and its victim ends at the same point of them all.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from ringdp import Communicator, Work
from tests.comm.failing import COLLECTIVES, hear
from tests.forks import Forks, Say

pytestmark = pytest.mark.process

SMALL, LARGE = 1000, 50_000  # elements; a large one takes milliseconds
ALLOWED = 5.0  # s; what it takes is 0.01 s, but a busy machine may stand still for as long


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raising() -> None:
    sys.excepthook = lambda *_: None  # its traceback is of no use to a reader of the tests
    raise RuntimeError("a bug of the user's")


def exiting() -> None:
    sys.exit(7)


def vanishing() -> None:
    os._exit(9)


ENDS: dict[Callable[[], None], int] = {killed: -9, raising: 1, exiting: 7, vanishing: 9}


def victim_ends(comm: Communicator, say: Say, how: str, when: str) -> None:
    comms = {name: comm.duplicate() for name in COLLECTIVES}
    for c in comms.values():
        c.barrier()  # collective 0
    x = torch.ones(LARGE if when == "within" else SMALL)
    works: dict[str, Work] = {}

    def begin(name: str) -> None:
        works[name] = COLLECTIVES[name](comms[name], x.clone(), async_op=True)

    if comm.rank == comm.size - 1:
        for name in COLLECTIVES if when != "before" else ():
            begin(name)
        for work in works.values() if when == "after" else ():
            work.wait()
        say(time.monotonic())
        globals()[how]()
    early = {name: hear(c, partial(begin, name)) for name, c in comms.items()}
    for name, c in comms.items():
        say((name, early[name] or hear(c, works[name].wait, c.barrier)))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("when", ["before", "within", "after"])
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_is_lost_to_every_other(forks: Forks, how, when, n):
    *others, (code, (died,)) = forks(n, victim_ends, how.__name__, when)
    assert code == ENDS[how]
    after: list[float] = []
    for code, said in others:
        assert code == 0
        heard = dict(said)
        assert heard.keys() == COLLECTIVES.keys()
        for name, h in heard.items():
            assert h is not None, f"{name} went on"
            assert h.error == h.again == "PeerLost", h
            assert f"rank {n - 1} has ended" in h.text, h
            assert h.at - died < ALLOWED, h
            after.append(h.at - died)
    print(f"{how.__name__} {when}, {n} ranks: told {min(after):.4f} to {max(after):.4f} s later")
