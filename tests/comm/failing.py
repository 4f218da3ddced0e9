"""What tests of failures share: collectives to fail in, and what a rank hears of a failure."""

from __future__ import annotations

import gc
import linecache
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor
from torch.distributed import Store

from ringdp import CommunicationError, Communicator, Work
from ringdp.schedule import ALGORITHMS
from ringdp.transport.arena import Arena
from ringdp.transport.shm.transport import ShmTransport
from ringdp.transport.store.handshake import Handshake


def joined(store: Store, rank: int, ranks: int, arena: Arena | None = None) -> ShmTransport:
    """That rank's end of shared memory, with those that meet in the store."""
    handshake = Handshake(store, rank, ranks)
    with handshake.session():
        return ShmTransport(handshake, arena=arena)


class Caught(NamedTuple):
    """An error as one rank got it; `at` is on the clock that all processes of a host share."""

    error: str
    text: str
    at: float
    seconds: float
    again: str  # the error of the next call


def catch(comm: Communicator, *calls: Callable[[], object]) -> Caught | None:
    """The first error of the calls, in their order."""
    start = time.monotonic()
    try:
        for call in calls:
            call()
    except CommunicationError as e:
        now = time.monotonic()
        with pytest.raises(CommunicationError) as again:
            comm.barrier()
        return Caught(type(e).__name__, str(e), now, now - start, type(again.value).__name__)
    return None


def until_failed(comm: Communicator) -> None:
    """In the user's code, until another rank has given up."""
    while comm._transport.failure() is None:
        time.sleep(0.01)


def held() -> Counter[str]:
    """This process's mapped segments and its descriptors, by name. What it had before may go at any
    time, so `held() - before` is what is left."""
    gc.collect()
    found = Counter(
        re.findall(r"memfd:ringdp\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    )
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself, for one
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


def leaves_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks that what it does to `comm`'s duplicates leaves no memory and no descriptor."""

    @wraps(function)
    def run(comm: Communicator, *arguments: Any) -> Any:
        before = held()
        result = function(comm, *arguments)
        assert not held() - before
        comm.barrier()
        return result

    return run


def fallible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives it a duplicate to ruin, and checks that its end leaves nothing."""

    @wraps(function)
    def run(comm: Communicator, *arguments: Any) -> Any:
        with comm.duplicate() as other:
            other.barrier()  # collective 0
            return function(other, *arguments)

    return leaves_nothing(run)


# Each moves x, or so many elements from or to every rank.
PLAIN: dict[str, Callable[..., Work]] = {
    "all_reduce": lambda c, x, **how: c.all_reduce(x, **how),
    "reduce_scatter": lambda c, x, **how: c.reduce_scatter(
        torch.empty_like(x), all_of(c, x), **how
    ),
    "all_gather": lambda c, x, **how: c.all_gather(all_of(c, x), x, **how),
    "broadcast": lambda c, x, **how: c.broadcast(x, **how),
    "reduce": lambda c, x, **how: c.reduce(x, **how),
    "gather": lambda c, x, **how: c.gather(all_of(c, x), x, **how),
    "scatter": lambda c, x, **how: c.scatter(x, all_of(c, x), **how),
    "all_to_all": lambda c, x, **how: c.all_to_all(all_of(c, x), all_of(c, x), **how),
}
UNEVEN: dict[str, Callable[..., Work]] = {
    "reduce_scatter_v": lambda c, x, **how: c.reduce_scatter_v(
        torch.empty_like(x), all_of(c, x), sizes(c, x), **how
    ),
    "all_gather_v": lambda c, x, **how: c.all_gather_v(all_of(c, x), x, sizes(c, x), **how),
    "gather_v": lambda c, x, **how: c.gather_v(all_of(c, x), x, sizes(c, x), **how),
    "scatter_v": lambda c, x, **how: c.scatter_v(x, all_of(c, x), sizes(c, x), **how),
    "all_to_all_v": lambda c, x, **how: c.all_to_all_v(
        all_of(c, x), all_of(c, x), sizes(c, x), sizes(c, x), **how
    ),
}
COLLECTIVES = PLAIN | UNEVEN


def all_of(comm: Communicator, x: Tensor) -> Tensor:
    return x.repeat(comm.size)


def sizes(comm: Communicator, x: Tensor) -> list[int]:
    return [x.numel()] * comm.size


class Form(NamedTuple):
    """A collective by one of its algorithms."""

    collective: str
    algorithm: str

    def __str__(self) -> str:
        return f"{self.collective} by {self.algorithm}"

    @property
    def name(self) -> str:
        """As errors call it."""
        own = self.collective == "all_to_all_v"  # with rows of its own
        return self.collective if own else self.collective.removesuffix("_v")

    def call(self, comm: Communicator, x: Tensor, **how: Any) -> Work:
        if self.collective != "all_to_all_v":  # which has no choice
            how["algorithm"] = self.algorithm
        return COLLECTIVES[self.collective](comm, x, **how)

    def begin(self, comm: Communicator, x: Tensor) -> Work:
        return self.call(comm, x, async_op=True)


FORMS = [Form(a.collective, a.name) for a in ALGORITHMS if a.collective in PLAIN]
FORMS += [Form(collective, "direct") for collective in UNEVEN]


def forms(turn: int | None) -> list[Form]:
    """All of them, or in each turn another algorithm of every collective, and one with sizes."""
    if turn is None:
        return FORMS
    found = []
    for collective in [*PLAIN, list(UNEVEN)[turn % len(UNEVEN)]]:
        choice = [f for f in FORMS if f.collective == collective]
        found.append(choice[turn % len(choice)])
    return found


WHENS, RANKS = ("before", "within", "after"), (2, 4, 8)


def matrix(hows: Collection[str]) -> list[ParameterSet]:
    """(how, when, ranks, victim, turn) of failures: a sample, and in `exhaustive` the product.

    The sample has every how, when and number of ranks beside every other.
    """
    sample = []
    for a, how in enumerate([*hows, *hows][: max(len(hows), len(RANKS))]):
        for b, when in enumerate(WHENS):
            n, turn = RANKS[(a + b) % len(RANKS)], len(WHENS) * a + b
            victim = (n - 1) * (turn % 2)
            sample.append(pytest.param(how, when, n, victim, turn, id=f"{how}-{when}-{n}"))
    return sample + [
        pytest.param(
            *(how, when, n, victim, None),
            id=f"{how}-{when}-{n}-rank{victim}",
            marks=pytest.mark.exhaustive,
        )
        for how, when, n in product(hows, WHENS, RANKS)
        for victim in (0, n - 1)
    ]


def by_turns(rows: Iterable[tuple[Any, ...]], last: Sequence[Any]) -> list[ParameterSet]:
    """(*row, n): with each row another n of the `last`, and in `exhaustive` every one."""
    return [
        pytest.param(*row, n, marks=() if i % len(last) == j else pytest.mark.exhaustive)
        for i, row in enumerate(rows)
        for j, n in enumerate(last)
    ]


TESTS = Path(__file__).parents[1]
CALL = re.compile(
    r"rank \d waited for (\w+) #\d+(?: \(.*\) of \d+ elements, tag 0)?, at (.+?):(\d+)\b"
)


def line_of(file: str, number: str) -> str:
    """A test's, where an error says that it is: the head of a long path is cut."""
    return linecache.getline(f"{TESTS}/{file.rpartition('/tests/')[2]}", int(number))


def names_its_line(text: str) -> bool:
    """Whether an error begins with a call and a line that makes it; `hear` makes those it is given
    as `call()`."""
    found = CALL.match(text)
    if found is None:
        return False
    line = line_of(found[2], found[3])
    return f".{found[1]}" in line or line.strip() == "call()"


def row_of(rank: int, text: str) -> str:
    """Its row in the table of an error that says the rest in one line."""
    row = text.splitlines()[2 + rank]
    assert row.split()[0] == str(rank)
    return row
