"""The emulated network: as late as it says, with the same bits, and at rest meanwhile."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.schedule.cost import Machine, closed, seconds
from tests.comm.test_collectives import rounded_once
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

SLOW = ringdp.Link(latency=0.01, bandwidth=4e6)  # s, bytes/s
ELEMENTS = 100_000  # 0.1 s for each time that the buffer goes over the link


def over(comm: Communicator, algorithm: str) -> tuple[bool, float, float, float]:
    """Whether the bits are those without a link; when it began and ended, and seconds of CPU."""
    g = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(ELEMENTS, generator=g)
    y, z = x.clone(), x.clone()
    comm.all_reduce(x, algorithm=algorithm)
    with ringdp.init(link=SLOW) as slow:
        slow.barrier()
        began, busy = time.monotonic(), time.process_time()
        slow.all_reduce(y, algorithm=algorithm, async_op=True).wait()
        ended, busy = time.monotonic(), time.process_time() - busy
        slow.all_reduce(z, algorithm=algorithm)  # the caller stops now and then to look for signals
    return torch.equal(x, y) and torch.equal(x, z), began, ended, busy


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "doubling"])
def test_a_link_is_as_slow_as_it_says_and_costs_nothing(ranks, n, algorithm):
    # A message pays the latency once: 100,000 floats are as many as 100 slabs.
    machine = Machine(alpha=SLOW.latency, beta=1 / SLOW.bandwidth, gamma=0)
    predicted = seconds(closed("all_reduce", algorithm, n), machine, 4 * ELEMENTS)
    found = ranks(n)(over, algorithm)
    first = min(began for _, began, _, _ in found)
    for same, _, ended, busy in found:
        assert same
        assert ended - first >= 0.9 * predicted  # who begins late ends no earlier
        assert busy < (ended - first) / 2


def held_back(comm: Communicator, file: str) -> tuple[list[tuple[str, float, float]], bool]:
    """When each began and ended, and whether it was right. Leaves a trace."""
    n, said = comm.size, []
    with ringdp.init(link=SLOW) as slow:
        whole, part = slow.empty(n * ELEMENTS), slow.empty(ELEMENTS)
        calls = {
            "reduce_scatter": lambda: slow.reduce_scatter(part, whole, async_op=True),
            "all_gather": lambda: slow.all_gather(whole, part, async_op=True),
        }
        whole.fill_(comm.rank + 1)
        with ringdp.trace(file):
            for name, call in calls.items():
                slow.barrier()
                began = time.monotonic()
                call().wait()
                said.append((name, began, time.monotonic()))
        return said, bool((whole == n * (n + 1) / 2).all())


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_direct_goes_through_no_messages_and_ends_when_they_would(ranks, n, tmp_path):
    machine = Machine(alpha=SLOW.latency, beta=1 / SLOW.bandwidth, gamma=0)
    file = tmp_path / "run.json"
    of_ranks = ranks(n)(held_back, str(file))
    assert all(right for _, right in of_ranks)
    for same in zip(*(said for said, _ in of_ranks), strict=True):
        name = same[0][0]
        predicted = seconds(closed(name, "direct", n), machine, 4 * n * ELEMENTS)
        first = min(began for _, began, _ in same)
        assert min(ended for _, _, ended in same) - first >= 0.9 * predicted
    events = json.loads(file.read_bytes())["traceEvents"]
    ways = {e["name"] for e in events if e.get("cat") == "chunk" and e["args"]["bytes"] > 1000}
    assert ways
    assert not ways & {"send", "recv", "recv_reduce_copy"}


def beats(comm: Communicator) -> int:
    """How often a thread beside a barrier got the interpreter meanwhile."""
    count, over = [0], threading.Event()

    def beat() -> None:
        while not over.wait(0.002):
            count[0] += 1

    with ringdp.init(link=ringdp.Link(latency=0.2, bandwidth=1e9)) as slow:
        slow.barrier()  # the next one is a repeated call
        beside = threading.Thread(target=beat)
        beside.start()
        comm.barrier()
        before = count[0]
        slow.barrier()
        found = count[0] - before
        over.set()
        beside.join()
    return found


def test_other_threads_go_on_while_a_short_message_is_under_way(ranks):
    assert min(ranks(2)(beats)) > 5


@on_ranks(2)
def test_averages_are_rounded_once(comm: Communicator) -> None:
    with ringdp.init(link=ringdp.Link(latency=0.001, bandwidth=1e9)) as linked:
        rounded_once(linked)
