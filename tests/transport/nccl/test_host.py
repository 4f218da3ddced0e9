"""The host NCCL through CuPy's binding: results, refusals, injected faults and cleanup."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.transport.nccl.library import (
    binding,
    grouped,
)
from ringdp.transport.nccl.native import TYPES
from tests.comm.failing import held
from tests.transport.nccl.faults import FAIL, STALL, fault, fault_is_due, only_with_host_nccl
from tests.waiting import wait_until

only_with_host_nccl()

UINT8, FLOAT = 1, 7
INVALID_ARGUMENT, INVALID_USAGE, REMOTE = "INVALID_ARGUMENT", "INVALID_USAGE", "REMOTE_ERROR"
SYSTEM_ERROR = "SYSTEM_ERROR"
nccl: Any = binding(host=True)
SECONDS = 120.0  # only a hang takes as long


def run_on_threads(comms: list[Any], act: Callable[[Any, int], Any]) -> list[Any]:
    """Runs act(comm, rank) on a thread for each; returns each result or NcclError."""
    results: list[Any] = ["hangs"] * len(comms)

    def run(rank: int) -> None:
        try:
            results[rank] = act(comms[rank], rank)
        except nccl.NcclError as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(len(comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return results


@pytest.fixture
def comms() -> list[Any]:
    return nccl.NcclCommunicator.initAll(3)


def input_of(rank: int, dtype: torch.dtype, elements: int = 12) -> Tensor:
    return (torch.arange(elements) % 5 + 2 * rank).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_collectives_of_every_dtype(comms: list[Any], dtype: torch.dtype):
    inputs = [input_of(r, dtype) for r in range(3)]
    total = sum(inputs[1:], inputs[0].clone())

    def act(comm: Any, rank: int) -> list[Tensor]:
        mine, type_ = inputs[rank], TYPES[dtype]
        out = [torch.zeros_like(mine) for _ in range(4)]
        part = torch.zeros(4, dtype=dtype)
        at = mine.data_ptr()
        comm.allReduce(at, out[0].data_ptr(), 12, type_, 0, 0)
        comm.allReduce(at, out[1].data_ptr(), 12, type_, 4, 0)
        comm.reduceScatter(at, part.data_ptr(), 4, type_, 0, 0)
        comm.allGather(part.data_ptr(), out[2].data_ptr(), 4, type_, 0)
        comm.reduce(at, out[3].data_ptr() if rank == 1 else 0, 12, type_, 2, 1, 0)
        comm.broadcast(out[3].data_ptr(), out[3].data_ptr(), 12, type_, 1, 0)
        return out

    mean = (total // 3) if not dtype.is_floating_point else (total.float() / 3).to(dtype)
    for out in run_on_threads(comms, act):
        for found, expected in zip(out, (total, mean, total, inputs[2]), strict=True):
            assert torch.equal(found, expected)


def test_messages_of_a_group_run_concurrently_and_in_order_per_pair(comms: list[Any]):
    long = 300_000  # several slots

    def act(comm: Any, rank: int) -> bool:
        mine = [input_of(10 * rank + k, torch.float32, long) for k in range(3)]
        found = torch.zeros(3, 3, long)
        with grouped(nccl):
            for peer in range(3):
                for k in range(3):
                    comm.send(mine[k].data_ptr(), long, FLOAT, peer, 0)
                    comm.recv(found[peer, k].data_ptr(), long, FLOAT, peer, 0)
        expected = [input_of(10 * p + k, torch.float32, long) for p in range(3) for k in range(3)]
        return torch.equal(found.view(9, long), torch.stack(expected))

    assert run_on_threads(comms, act) == [True] * 3


X = torch.zeros(64)
AT = X.data_ptr()
REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a peer beyond the last": (lambda c: c.send(AT, 1, FLOAT, 3, 0), INVALID_ARGUMENT),
    "a negative peer": (lambda c: c.recv(AT, 1, FLOAT, -1, 0), INVALID_ARGUMENT),
    "no such dtype": (lambda c: c.send(AT, 1, 12, 0, 0), INVALID_ARGUMENT),
    "no buffer": (lambda c: c.send(0, 1, FLOAT, 1, 0), INVALID_ARGUMENT),
    "no such op": (lambda c: c.allReduce(AT, AT, 1, FLOAT, 5, 0), INVALID_ARGUMENT),
    "float8 is not added": (lambda c: c.allReduce(AT, AT, 1, 10, 0, 0), INVALID_ARGUMENT),
    "a root beyond the last": (lambda c: c.broadcast(AT, AT, 1, FLOAT, 3, 0), INVALID_ARGUMENT),
    "too much for memory": (lambda c: c.allReduce(AT, AT, 1 << 50, FLOAT, 0, 0), SYSTEM_ERROR),
    "to itself, alone": (lambda c: c.send(AT, 1, FLOAT, 0, 0), INVALID_USAGE),
    "an end without a start": (lambda *_: nccl.groupEnd(), INVALID_USAGE),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_nccl_refuses_are_refused(comms: list[Any], what: str):
    act, expected = REFUSED[what]
    with pytest.raises(nccl.NcclError, match=expected):
        act(comms[0])
    if what != "an end without a start":
        with pytest.raises(nccl.NcclError, match=expected), grouped(nccl):
            act(comms[0])


@pytest.mark.parametrize("what", ["lengths", "collectives", "dtypes"])
def test_mismatched_calls_fail_on_all_ranks(comms: list[Any], what: str):
    def act(comm: Any, rank: int) -> None:
        x = torch.zeros(8)
        at, odd = x.data_ptr(), rank == 1
        match what:
            case "lengths":
                with grouped(nccl):
                    comm.send(at, 7, FLOAT, (rank + 1) % 3, 0)  # no send fits its receive
                    comm.recv(at, 8, FLOAT, (rank - 1) % 3, 0)
            case "collectives":
                if odd:
                    comm.allGather(at, torch.zeros(24).data_ptr(), 8, FLOAT, 0)
                else:
                    comm.allReduce(at, at, 8, FLOAT, 0, 0)
            case "dtypes":
                comm.allReduce(at, at, 8, FLOAT - odd, 0, 0)

    for result in run_on_threads(comms, act):
        assert INVALID_USAGE in str(result)


def pair() -> list[Any]:
    return nccl.NcclCommunicator.initAll(2)


def to_itself(comm: Any) -> None:
    """Completes at once, unless it is refused because another thread is in a call."""
    with grouped(nccl):
        comm.send(AT, 0, FLOAT, comm.rank_id(), 0)
        comm.recv(AT, 0, FLOAT, comm.rank_id(), 0)


def until_in_a_call(comm: Any) -> None:
    """Waits until another thread is in a call. That thread retries if its own call is refused."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            to_itself(comm)
        except nccl.NcclError:
            return
    pytest.fail(f"no call in {SECONDS} s")


def test_a_send_blocks_until_it_is_aborted():
    comms = pair()
    ended: list[str] = []

    def both_send(comm: Any, rank: int) -> None:
        while True:
            try:
                comm.send(AT, 1, FLOAT, 1 - rank, 0)
                ended.append("well")
            except nccl.NcclError as e:
                if INVALID_USAGE in str(e):
                    continue
                ended.append(str(e))
            return

    threads = [
        threading.Thread(target=both_send, args=(c, r), daemon=True) for r, c in enumerate(comms)
    ]
    for thread, comm in zip(threads, comms, strict=True):
        thread.start()
        until_in_a_call(comm)
    assert not ended
    for comm, thread in zip(comms, threads, strict=True):
        comm.abort()
        thread.join(SECONDS)
    assert len(ended) == 2
    assert all("was aborted" in text for text in ended)


def test_concurrent_calls_on_one_communicator_are_refused():
    comm, other = pair()
    until = time.monotonic() + SECONDS
    # of two concurrent calls the later is refused, which may be either
    refused: list[nccl.NcclError] = []

    def receive() -> None:
        while time.monotonic() < until:
            try:
                comm.recv(AT, 1, FLOAT, 1, 0)
                return
            except nccl.NcclError as e:
                refused.append(e)

    waits = threading.Thread(target=receive, daemon=True)
    waits.start()
    while not refused and time.monotonic() < until:  # until the thread is in its call
        try:
            to_itself(comm)
        except nccl.NcclError as e:
            refused.append(e)
    assert refused
    assert all(INVALID_USAGE in str(e) for e in refused)
    other.send(AT, 1, FLOAT, 0, 0)
    waits.join(SECONDS)
    assert not waits.is_alive()


def test_an_injected_failure_happens_once():
    (comm,) = nccl.NcclCommunicator.initAll(1)
    fault(FAIL, launches=1)
    comm.allReduce(AT, AT, 1, FLOAT, 0, 0)
    comm.check_async_error()
    with pytest.raises(nccl.NcclError, match=REMOTE):
        comm.allReduce(AT, AT, 1, FLOAT, 0, 0)
    with pytest.raises(nccl.NcclError, match=REMOTE):
        comm.check_async_error()
    comm.allReduce(AT, AT, 1, FLOAT, 0, 0)


def test_an_injected_stall_ends_with_an_abort():
    (comm,) = nccl.NcclCommunicator.initAll(1)
    fault(STALL)
    stalled = threading.Thread(target=run_on_threads, args=([comm], stuck), daemon=True)
    stalled.start()
    wait_until(lambda: not fault_is_due())
    stalled.join(0.05)
    assert stalled.is_alive()
    comm.abort()
    stalled.join(SECONDS)
    assert not stalled.is_alive()


def stuck(comm: Any, _: int) -> None:
    comm.allReduce(AT, AT, 1, FLOAT, 0, 0)


def test_a_split_has_its_own_ranks(comms: list[Any]):
    def act(comm: Any, rank: int) -> tuple[int, int, list[float]]:
        part = comm.commSplit(rank % 2, -rank)
        x = torch.tensor([float(rank)])
        part.allReduce(x.data_ptr(), x.data_ptr(), 1, FLOAT, 0, 0)
        return part.rank_id(), part.size(), x.tolist()

    assert run_on_threads(comms, act) == [(1, 2, [2.0]), (0, 1, [1.0]), (0, 2, [2.0])]


def test_a_split_is_refused_in_a_group(comms: list[Any]):
    for color in 0, -1:
        with pytest.raises(nccl.NcclError, match=INVALID_USAGE), grouped(nccl):
            comms[0].commSplit(color, 0)


def test_rank_size_device_and_version(comms: list[Any]):
    assert [(c.rank_id(), c.size(), c.device_id()) for c in comms] == [(r, 3, 0) for r in range(3)]
    assert nccl.get_version() == 22707


def test_destroyed_communicators_free_their_resources():
    before = held()
    comms = pair()
    assert "hostnccl" in " ".join(held() - before)
    for comm in comms:
        comm.destroy()
    assert not held() - before


def test_failed_creations_free_their_resources():
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    before = held()
    fault(FAIL)
    with pytest.raises(nccl.NcclError):
        comm.commSplit(0, 0)
    with pytest.raises(nccl.NcclError):
        nccl.NcclCommunicator.initAll(65)  # more ranks than there may be
    quiet = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(nccl.NcclError):
            nccl.get_unique_id()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, quiet)
    assert not held() - before


def test_foreign_and_forged_ids_are_refused():
    with pytest.raises(nccl.NcclError, match=INVALID_ARGUMENT):
        nccl.NcclCommunicator(1, bytes(128), 0)
    forged = bytearray(nccl.get_unique_id())
    forged[8] ^= 1  # a byte of the token
    with pytest.raises(nccl.NcclError, match=INVALID_ARGUMENT):
        nccl.NcclCommunicator(1, bytes(forged), 0)
    empty = os.memfd_create("foreign")
    forged[24:32] = empty.to_bytes(8, "little")  # the descriptor
    with pytest.raises(nccl.NcclError, match=INVALID_ARGUMENT):
        nccl.NcclCommunicator(1, bytes(forged), 0)
    os.close(empty)
