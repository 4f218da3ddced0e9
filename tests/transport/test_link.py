"""The emulated network: as late as it says, with the same bits, and at rest meanwhile."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.schedule.cost import Machine, closed, seconds

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
