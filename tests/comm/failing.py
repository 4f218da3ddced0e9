"""Shared by tests of failures: collectives to fail in, and the error that a rank gets."""

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

import ringdp
from ringdp import CommunicationError, Communicator, Work
from ringdp.schedule import ALGORITHMS
from ringdp.transport.arena import Arena
from ringdp.transport.shm.transport import ShmTransport
from ringdp.transport.store.handshake import Handshake
from tests.forks import CALL_TIMEOUT
from tests.waiting import wait_until


def connect(
    store: Store, rank: int, ranks: int, timeout: float = CALL_TIMEOUT, arena: Arena | None = None
) -> ShmTransport:
    """A rank's shared-memory transport, connected to the others through the store."""
    handshake = Handshake(store, rank, ranks, timeout)
    with handshake.session():
        return ShmTransport(handshake, arena=arena)


class Caught(NamedTuple):
    """An error that one rank got; `at` is on the clock that all processes of a host share."""

    error: str
    text: str
    at: float
    seconds: float
    again: str  # the type of the next call's error


def catch(comm: Communicator, *calls: Callable[[], object]) -> Caught | None:
    """The first error that one of the calls raises; None if they all succeed."""
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
    """Runs user code until another rank has failed."""
    wait_until(comm._transport.failure, 2 * CALL_TIMEOUT)


def held() -> Counter[str]:
    """This process's mapped segments and descriptors, by name. Earlier ones may go at any time, so
    a leak is what `held() - before` has."""
    gc.collect()
    found = Counter(
        re.findall(r"memfd:ringdp\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    )
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # such as the descriptor of the listing itself
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


def leaves_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks that the function, which may make duplicates of `comm`, leaves no memory and no
    descriptor."""

    @wraps(function)
    def run(comm: Communicator, *arguments: Any) -> Any:
        before = held()
        result = function(comm, *arguments)
        assert not held() - before
        comm.barrier()
        return result

    return run


def fallible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the function a duplicate that it may break, and checks that nothing is left of it."""

    @wraps(function)
    def run(comm: Communicator, *arguments: Any) -> Any:
        with comm.duplicate() as other:
            other.barrier()  # collective 0
            return function(other, *arguments)

    return leaves_nothing(run)


# Collectives on x, or on x.numel() elements from or to every rank.
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
    """A collective and one of its algorithms."""

    collective: str
    algorithm: str

    def __str__(self) -> str:
        return f"{self.collective} by {self.algorithm}"

    @property
    def name(self) -> str:
        """The name in error messages."""
        own = self.collective == "all_to_all_v"  # has a program of its own
        return self.collective if own else self.collective.removesuffix("_v")

    def call(self, comm: Communicator, x: Tensor, **how: Any) -> Work:
        if self.collective != "all_to_all_v":  # has only one algorithm
            how["algorithm"] = self.algorithm
        return COLLECTIVES[self.collective](comm, x, **how)

    def begin(self, comm: Communicator, x: Tensor) -> Work:
        return self.call(comm, x, async_op=True)


FORMS = [Form(a.collective, a.name) for a in ALGORITHMS if a.collective in PLAIN]
FORMS += [Form(collective, "direct") for collective in UNEVEN]


def forms(turn: int | None) -> list[Form]:
    """All forms; or in each turn another algorithm of every collective, and one collective with
    sizes."""
    if turn is None:
        return FORMS
    found = []
    for collective in [*PLAIN, list(UNEVEN)[turn % len(UNEVEN)]]:
        choice = [f for f in FORMS if f.collective == collective]
        found.append(choice[turn % len(choice)])
    return found


SOME = [Form("all_reduce", "ring"), Form("all_gather", "direct"), Form("broadcast", "binomial")]
WHENS, RANKS, RANKS_OVER_GLOO = ("before", "within", "after"), (2, 4, 8), (2, 4)


def matrix(hows: Collection[str]) -> list[ParameterSet]:
    """(transport, how, when, ranks, victim, forms) of failures: a sample, and as `exhaustive` the
    full product.

    The sample has every pair of how and when over each transport, and in shared memory every number
    of ranks with each of them.
    """
    sample: list[tuple[str, str, str, int, int, list[Form]]] = []
    for a, how in enumerate([*hows, *hows][: max(len(hows), len(RANKS))]):
        for b, when in enumerate(WHENS):
            n, turn = RANKS[(a + b) % len(RANKS)], len(WHENS) * a + b
            sample.append(("shm", how, when, n, (n - 1) * (turn % 2), forms(turn)))
    for i, (how, when) in enumerate(product(hows, WHENS)):
        n = RANKS_OVER_GLOO[i % 2]
        sample.append(("c10d", how, when, n, (n - 1) * (i // 2 % 2), SOME))
    whole = [
        (transport, how, when, n, victim, asked)
        for transport, ranks, asked in (("shm", RANKS, FORMS), ("c10d", RANKS_OVER_GLOO, SOME))
        for how, when, n in product(hows, WHENS, ranks)
        for victim in (0, n - 1)
    ]
    names = "{}-{}-{}-{}", "{}-{}-{}-{}-rank{}"
    return [
        *(pytest.param(*row, id=names[0].format(*row)) for row in sample),
        *(
            pytest.param(*row, id=names[1].format(*row), marks=pytest.mark.exhaustive)
            for row in whole
        ),
    ]


def duplicates(
    comm: Communicator, transport: str, count: int, warn_after: float = CALL_TIMEOUT
) -> list[Communicator]:
    """`count` communicators over the transport, whose collective 0 has ended on all ranks."""
    if transport == "shm":
        whole = comm
    else:
        whole = ringdp.init(transport=transport, timeout=CALL_TIMEOUT, warn_after=warn_after)
    found = [whole.duplicate() for _ in range(count)]
    for made in found:
        made.barrier()
    comm.barrier()  # otherwise a rank still in one of these could notice the failure there
    return found


def by_turns(rows: Iterable[tuple[Any, ...]], last: Sequence[Any]) -> list[ParameterSet]:
    """Rows (*row, n). Each row runs with one n of `last`, in turn; all others are `exhaustive`."""
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
    """The line of a test that an error names; errors cut the head of a long path."""
    return linecache.getline(f"{TESTS}/{file.rpartition('/tests/')[2]}", int(number))


def names_its_line(text: str) -> bool:
    """Whether an error begins with a call and the line that makes it, which in `catch` is
    `call()`."""
    found = CALL.match(text)
    if found is None:
        return False
    line = line_of(found[2], found[3])
    return f".{found[1]}" in line or line.strip() == "call()"


def assert_shows_both_calls(text: str, mistaken: int, where: str) -> None:
    """Asserts that the error of a mismatch has the mistaken rank's call and another's, each with
    its line."""
    calls = re.findall(r"^  rank (\d): (\w+) (#.*) at (.*):(\d+)$", text, re.M)
    (one, *call), (other, *other_call) = calls
    assert one != other, where
    assert str(mistaken) in (one, other), where
    assert call[:2] != other_call[:2], where
    for _, name, _, file, line in calls:
        assert f".{name}" in line_of(file, line), where


def row_of(rank: int, text: str) -> str:
    """The rank's row in the table of an error whose message is one line."""
    row = text.splitlines()[2 + rank]
    assert row.split()[0] == str(rank)
    return row
