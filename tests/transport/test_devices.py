"""Transports whose collectives a device runs, here on the host: bits, training and failures."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import ringdp
from ringdp import Communicator
from ringdp.transport.store import status
from tests.comm.failing import catch, duplicates, until_failed
from tests.equal import equal
from tests.forks import CALL_TIMEOUT, Forks, Report, die, meet
from tests.parallel.test_engine import train
from tests.ranks import on_ranks
from tests.transport.device_bodies import (
    Trained,
    adafactor,
    ddp,
    from_pieces,
    in_replicas,
    train_clipped,
)
from tests.transport.nccl.faults import LOSE, fault, only_with_host_nccl
from tests.transport.offered import offered
from tests.transport.over import init_over, over
from tests.transport.test_conformance import LONG, NAMES, ROWS, Case, assert_simulators_bits
from tests.waiting import wait_until

pytestmark = pytest.mark.process

LENGTHS = (0, 1, 7, 1003)


@pytest.fixture(params=["nccl-host", "peer-host"])
def transport(request) -> str:
    if request.param == "nccl-host":
        only_with_host_nccl()
    return request.param


@pytest.fixture
def over_device(ranks, transport) -> Callable[[int], Callable[..., Any]]:
    return lambda n: partial(ranks(n), over, transport)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_algorithm_gives_the_simulators_bits(over_device, n: int):
    floats = ("float32", "bfloat16")
    cases = [
        Case(*row, LENGTHS[(i + k + n) % 4], dtype)
        for k, dtype in enumerate(floats)
        for i, row in enumerate(ROWS)
    ]
    cases += [Case(*row, 1001 + n, dtype) for dtype in ("int16", "bool") for row in ROWS[:7]]
    cases += [Case("all_reduce", "direct", 1001 + n, dtype) for dtype in NAMES]
    cases += [Case("all_reduce", "direct", LONG // 4 + n, dtype) for dtype in floats]
    cases += [Case("all_reduce", "ring", LONG // 4 + n, "bfloat16")]
    assert_simulators_bits(over_device(n), n, cases)


@pytest.mark.parametrize("n", [2, 3])
@on_ranks(pool="over_device")
def test_all_communicator_functions_work(comm: Communicator) -> None:
    offered(comm)
    with comm.duplicate() as other, other.group():
        x = torch.ones(3)
        other.all_reduce(x)
        comm.barrier()
    assert torch.all(x == comm.size)
    with pytest.raises(ringdp.UsageError, match="moves tensors on cpu"):
        comm.all_reduce(torch.zeros(1, device="meta"))


MISTAKES = ("collective", "roots", "length", "dtype", "sizes", "message", "late")


@pytest.mark.parametrize("what", MISTAKES)
@on_ranks(2, pool="over_device")
def test_mismatched_calls_raise_on_both_ranks(comm: Communicator, what: str) -> None:
    x, odd = torch.ones(5000), comm.rank == 1
    sizes = [2500, 2500] if odd else [2000, 3000]
    act = {
        "collective": lambda: comm.broadcast(x) if odd else comm.all_reduce(x),
        "roots": lambda: comm.broadcast(x, 1 - comm.rank),  # each waits for the other's data
        "length": lambda: comm.all_reduce(x[1:] if odd else x),
        "dtype": lambda: comm.all_reduce(x.int() if odd else x),
        "sizes": lambda: comm.all_gather_v(x, x[: sizes[comm.rank]], sizes),
        "message": lambda: comm.recv(x[1:], 0) if odd else comm.send(x, 1),
        "late": lambda: until_failed(comm) if odd else comm.all_reduce(x, async_op=True).wait(0.3),
    }[what]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(status, "PATIENCE", CALL_TIMEOUT)  # a busy machine is slow
        caught = catch(comm, act, comm.barrier, comm.barrier)
    expected_error = "CollectiveTimeout" if what == "late" else "CollectiveMismatch"
    assert caught.error == caught.again == expected_error, caught
    if what == "collective":
        assert "rank 0: all_reduce #0 (float32, sum) of 5000 elements" in caught.text
        assert "rank 1: broadcast #0 (float32, root 0) of 5000 elements" in caught.text
        assert caught.text.count("test_devices.py:") == 4  # in two lines, and in the table


def rank_1_is_killed(comm: Communicator, report: Report, transport: str) -> None:
    """Over NCCL within its launch."""
    one, other = duplicates(comm, transport, 2)
    if comm.rank == 1:
        fault(LOSE, launches=1) if transport == "nccl-host" else die()
    x = torch.ones(5000)
    report(catch(one, lambda: one.all_reduce(x)))
    report(catch(other, lambda: other.all_gather(x.repeat(3), x)))
    meet(comm, "caught", without=1)


def test_a_killed_rank_is_named_on_every_other(forks: Forks, transport: str) -> None:
    first, (code, _), last = forks(3, rank_1_is_killed, transport)
    assert code == -signal.SIGKILL
    for code, reported in (first, last):
        assert code == 0
        for caught in reported:
            assert caught.error == caught.again == "PeerLost", caught
            assert "rank 1 has ended" in caught.text


@on_ranks(3)
def test_a_rank_that_closes_is_lost_to_ranks_whose_device_waits(
    comm: Communicator, transport: str
) -> None:
    """Rank 1 closes while the others have begun collectives that no rank waits for on the host."""
    c = init_over(comm, transport)
    c.barrier()
    if comm.rank == 1:
        c.close()
        return
    for _ in range(2):
        c.all_reduce(torch.ones(9), async_op=True)
    wait_until(lambda: c._transport.failure() is not None, CALL_TIMEOUT / 6)
    caught = catch(c, c.barrier)
    c.close()
    assert caught.error == caught.again == "PeerLost", caught
    assert "rank 1 has ended (it has closed)" in caught.text


@on_ranks(2)
def test_ranks_can_communicate_again_after_a_failure(comm: Communicator, transport: str) -> None:
    """Processes whose communicator has failed can create another."""
    c = ringdp.init(transport=transport, timeout=CALL_TIMEOUT)
    comm.barrier()  # both have created it
    if comm.rank == 0:
        c.abort()
    else:
        assert catch(c, lambda: c.all_reduce(torch.ones(9)), c.barrier).error == "PeerLost"
        c.abort()
    with init_over(comm, transport) as c:
        c.all_reduce(x := torch.ones(3))
        assert torch.all(x == comm.size)
        comm.barrier()


def train_in_stage(comm: Communicator, stage: int) -> Trained:
    run = train(comm, stage)
    return Trained(run.losses, run.parameters, run.sent)


@pytest.mark.parametrize(
    ("trained", "arguments"),
    [*((train_in_stage, (stage,)) for stage in range(4)), (ddp, ()), (adafactor, ())],
)
def test_training_gives_the_bits_of_shared_memory(over_device, ranks, trained, arguments):
    found = over_device(2)(trained, *arguments)
    for here, there in zip(found, ranks(2)(trained, *arguments), strict=True):
        assert here.losses == there.losses
        assert equal(here.parameters, there.parameters)
        assert here.sent == there.sent


@pytest.mark.parametrize(("trained", "n"), [(in_replicas, 2), (in_replicas, 4), (from_pieces, 4)])
def test_parts_of_the_ranks_have_the_bits_of_shared_memory(over_device, ranks, trained, n):
    for here, there in zip(over_device(n)(trained), ranks(n)(trained), strict=True):
        assert here.losses == there.losses
        assert equal(here.parameters, there.parameters)
        assert here.sent == there.sent


def test_scaled_and_clipped_training_gives_the_bits_of_shared_memory(over_device, ranks):
    assert over_device(2)(train_clipped) == ranks(2)(train_clipped)
