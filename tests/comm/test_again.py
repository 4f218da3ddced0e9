"""After a failure: the remaining ranks abort, and all ranks create communicators again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import ringdp
from ringdp import Communicator
from ringdp.comm.guard import Guard
from ringdp.transport.base import FailureKind
from ringdp.transport.records import CLOSED, SITE_BYTES, RankRecord
from ringdp.transport.store.processes import process_state
from tests.comm.failing import catch
from tests.forks import CALL_TIMEOUT, LIFETIME, Forks, Report, die, store
from tests.waiting import wait_until

pytestmark = pytest.mark.process


def rank_1_aborts(comm: Communicator, report: Report) -> None:
    with comm.duplicate() as other:
        other.barrier()
        if comm.rank == 1:
            comm.abort()
            comm.abort()
            with pytest.raises(ringdp.CommunicationError, match="closed"):
                other.barrier()  # duplicates are aborted too
            report(None)
        else:
            report([catch(comm, comm.barrier), catch(other, other.barrier)])
            comm.abort()
    for _ in range(2):  # a second time without an abort
        comm = ringdp.init(timeout=CALL_TIMEOUT)
        x = torch.tensor([comm.rank + 1])
        comm.all_reduce(x)
        report(x.item())


def test_an_abort_is_reported_at_once_and_ranks_can_start_again(forks: Forks):
    for rank, (code, reported) in enumerate(forks(3, rank_1_aborts)):
        assert code == 0
        caught, *sums = reported
        assert sums == [6, 6]
        for h in caught or ():
            assert h.error == h.again == "PeerLost", f"{rank}: {h}"
            assert "; rank 1 has aborted\n" in h.text


SUCCESSOR = """
import torch, ringdp
comm = ringdp.init(timeout=120)
comm.all_reduce(torch.tensor([1000]))
"""


def replace_a_dead_rank(comm: Communicator, report: Report) -> None:
    comm.barrier()
    if comm.rank == 1:
        subprocess.Popen([sys.executable, "-c", SUCCESSOR])
        die()
    report(catch(comm, comm.barrier).error)
    comm.abort()
    new = ringdp.init(timeout=LIFETIME)  # long, since a new interpreter has to import torch
    x = torch.tensor([new.rank + 1])
    new.all_reduce(x)
    report(x.item())


def test_a_new_process_takes_the_place_of_a_dead_one(forks: Forks):
    first, (code, _), last = forks(3, replace_a_dead_rank)
    assert code == -signal.SIGKILL
    assert first == last == (0, ["PeerLost", 1 + 1000 + 3])


def broadcast_until_full(comm: Communicator) -> None:
    """A root does not wait while there is room for what it sends."""
    for _ in range(1000):
        comm.broadcast(torch.ones(10), algorithm="binomial")


OCCASIONS: dict[str, Callable[[Communicator], None]] = {
    "close": lambda c: c.close(),
    "call": lambda c: c.barrier(),
    "wait": lambda c: c.all_reduce(torch.ones(10), async_op=True).wait(),
    "no room": broadcast_until_full,
}


def receiver_dies_after_broadcast(comm: Communicator, report: Report, occasion: str) -> None:
    """A broadcast that has completed at its root while a receiver has died."""
    comm.barrier()
    if comm.rank == 1:
        die()
    work = comm.broadcast(torch.ones(10), algorithm="binomial", async_op=True)
    pid = comm._transport.record(1).pid
    wait_until(lambda: "ended" in process_state(pid), CALL_TIMEOUT)
    work.wait()  # the broadcast has completed here, so this raises nothing
    report(catch(comm, lambda: OCCASIONS[occasion](comm)))


@pytest.mark.parametrize("occasion", OCCASIONS)
def test_a_root_learns_of_a_dead_receiver_at_its_next_call(forks: Forks, occasion):
    (_, (caught,)), _ = forks(2, receiver_dies_after_broadcast, occasion)
    assert caught.error == "PeerLost"
    assert "; rank 1 has ended (" in caught.text


class LeavingRank:
    """Two ranks: the other one completes its last collective, closes and exits while it is
    checked."""

    rank, ranks = 0, 2

    def __init__(self, records: list[RankRecord]) -> None:
        self.records = iter(records)

    def call(self, rank: int, number: int) -> tuple[int, int, int, bytes]:
        return number, 1 << 4, 10, b"train.py:40".ljust(SITE_BYTES, b"\0")

    def failure(self) -> None:
        return None

    def record(self, rank: int) -> RankRecord:
        return RankRecord(os.getpid(), 1, 1, -1, -1, 0.0) if rank == 0 else next(self.records)

    def fail(self, kind: FailureKind, rank: int) -> None:
        raise AssertionError(f"{kind} of rank {rank}")


def test_a_rank_that_closes_and_exits_is_not_lost():
    ended = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(ended, 0)
    within = RankRecord(ended, 1, 0, 0, 0, 0.0)
    closed = [within._replace(finished=1), within._replace(pid=CLOSED, finished=1)]
    for after in closed:
        Guard(LeavingRank([within, after]), 1.0).check_closing(1)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="LOST of rank 1"):
        Guard(LeavingRank([within, within]), 1.0).check_closing(1)  # type: ignore[arg-type]


UNWAITED: dict[str, Callable[[Communicator], object]] = {
    "program": lambda c: c.broadcast(torch.ones(10), algorithm="binomial"),
    "repeated": lambda c: c.all_reduce(torch.ones(10), async_op=True),
}


def rank_1_finds_that_rank_2_died(comm: Communicator, report: Report, call: str) -> None:
    """Rank 2 dies; rank 1 waits for it and so finds out; rank 0 waits for no rank."""
    UNWAITED["repeated"](comm)
    comm.barrier()
    if comm.rank == 2:
        die()
    if comm.rank == 1:
        report(catch(comm, comm.barrier))
        store().set("lost", "")
    else:
        store().wait(["lost"])
        report(catch(comm, lambda: UNWAITED[call](comm)))


@pytest.mark.parametrize("call", UNWAITED)
def test_any_call_raises_a_failure_that_another_rank_found(forks: Forks, call: str):
    for code, reported in forks(3, rank_1_finds_that_rank_2_died, call)[:2]:
        assert code == 0
        (caught,) = reported
        assert caught.error == "PeerLost"
        assert "; rank 2 has ended (" in caught.text


def train_with_checkpoints(path: str) -> tuple[int, list[float]]:
    """The step that training continued from, and the final weights."""
    comm = ringdp.init(timeout=CALL_TIMEOUT)
    weights, first = torch.zeros(4), 0
    if os.path.exists(path):
        saved = torch.load(path)
        weights, first = saved["weights"], saved["step"]
    for step in range(first, 6):
        if step == 3 and comm.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            die()
        gradient = torch.full((4,), (comm.rank + 1.0) * (step + 1))
        comm.all_reduce(gradient, "avg")
        weights -= 0.1 * gradient
        if comm.rank == 0:
            torch.save({"weights": weights, "step": step + 1}, path + ".new")
            os.replace(path + ".new", path)
    return first, weights.tolist()


def test_after_torchruns_restart_training_continues_from_the_checkpoint(tmp_path, monkeypatch):
    """Uses torchrun's own launcher, with ranks forked here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # it leaves files of errors there
    config = LaunchConfig(
        *(1, 1, 2),  # 1 to 1 nodes of 2 ranks each
        run_id="again",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
        local_addr="127.0.0.1",
        max_restarts=1,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    # on the main thread the launcher would install signal handlers and leave them
    with ThreadPoolExecutor(1) as thread:
        started = thread.submit(
            elastic_launch(config, train_with_checkpoints), str(tmp_path / "checkpoint")
        )
        found = started.result()
    weights = torch.zeros(4)
    for step in range(6):
        weights -= 0.1 * torch.full((4,), 1.5 * (step + 1))
    assert found == dict.fromkeys(range(2), (3, weights.tolist()))
