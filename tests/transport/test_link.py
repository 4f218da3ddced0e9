"""The emulated link: as slow as configured, with the same bits, and without using the CPU."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.schedule.cost import Machine, closed, seconds
from tests.comm.test_arithmetic import check_averages_are_rounded_once
from tests.ranks import on_ranks
from tests.waiting import wait_until

pytestmark = pytest.mark.process

SLOW = ringdp.Link(latency=0.01, bandwidth=4e6)  # s, bytes/s
ELEMENTS = 100_000  # 0.1 s each time the buffer crosses the link


def all_reduce_over_link(comm: Communicator, algorithm: str) -> tuple[bool, float, float, float]:
    """Whether the bits equal those without a link; start and end times; seconds of CPU."""
    g = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(ELEMENTS, generator=g)
    y, z = x.clone(), x.clone()
    comm.all_reduce(x, algorithm=algorithm)
    with ringdp.init(link=SLOW) as slow:
        slow.barrier()
        began, busy = time.monotonic(), time.process_time()
        slow.all_reduce(y, algorithm=algorithm, async_op=True).wait()
        ended, busy = time.monotonic(), time.process_time() - busy
        # the caller waits in the call itself, where it stops now and then to check for signals
        slow.all_reduce(z, algorithm=algorithm)
    return torch.equal(x, y) and torch.equal(x, z), began, ended, busy


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "doubling"])
def test_a_link_is_as_slow_as_configured_and_uses_no_cpu(ranks, n, algorithm):
    # A message pays the latency once, although 100,000 floats are 100 slabs.
    machine = Machine(alpha=SLOW.latency, beta=1 / SLOW.bandwidth, gamma=0)
    predicted = seconds(closed("all_reduce", algorithm, n), machine, 4 * ELEMENTS)
    found = ranks(n)(all_reduce_over_link, algorithm)
    first = min(began for _, began, _, _ in found)
    for same, _, ended, busy in found:
        assert same
        assert ended - first >= 0.9 * predicted  # a rank that begins late does not end earlier
        assert busy < (ended - first) / 2


def direct_over_link(comm: Communicator, file: str) -> tuple[list[tuple[str, float, float]], bool]:
    """Each call's start and end times, and whether the results are right. Writes a trace."""
    n, times = comm.size, []
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
                times.append((name, began, time.monotonic()))
        return times, bool((whole == n * (n + 1) / 2).all())


@pytest.mark.parametrize("n", [2, 3])
def test_direct_collectives_use_no_messages_and_take_the_predicted_time(ranks, n, tmp_path):
    machine = Machine(alpha=SLOW.latency, beta=1 / SLOW.bandwidth, gamma=0)
    file = tmp_path / "run.json"
    of_ranks = ranks(n)(direct_over_link, str(file))
    assert all(right for _, right in of_ranks)
    for same in zip(*(times for times, _ in of_ranks), strict=True):
        name = same[0][0]
        predicted = seconds(closed(name, "direct", n), machine, 4 * n * ELEMENTS)
        first = min(began for _, began, _ in same)
        assert min(ended for _, _, ended in same) - first >= 0.9 * predicted
    events = json.loads(file.read_bytes())["traceEvents"]
    ways = {e["name"] for e in events if e.get("cat") == "chunk" and e["args"]["bytes"] > 1000}
    assert ways
    assert not ways & {"send", "recv", "recv_reduce_copy"}


@on_ranks(2)
def test_other_threads_run_during_a_short_message(comm: Communicator) -> None:
    """Rank 0 calls last, so in its call it waits for nothing but the time that a message takes."""
    seen, over = threading.Event(), threading.Event()
    with ringdp.init(link=ringdp.Link(latency=0.02, bandwidth=1e9)) as slow:
        record = slow._transport.record

        def look() -> None:
            while not over.wait(0.002):
                if record(0).begun > record(0).finished:
                    seen.set()

        slow.barrier()  # so the next ones are repeated calls
        looker = threading.Thread(target=look)
        looker.start()

        def has_seen() -> bool:
            if comm.rank == 0:
                wait_until(lambda: record(1).waits_for == 0)
            slow.barrier()
            comm.broadcast(found := torch.tensor([float(seen.is_set())]))
            return bool(found)

        wait_until(has_seen)
        over.set()
        looker.join()


@on_ranks(2)
def test_averages_over_a_link_are_rounded_once(comm: Communicator) -> None:
    with ringdp.init(link=ringdp.Link(latency=0.001, bandwidth=1e9)) as linked:
        check_averages_are_rounded_once(linked)
