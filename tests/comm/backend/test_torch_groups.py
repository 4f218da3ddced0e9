"""torch's process groups over the backend: creation, splitting, failures, destruction,
re-creation."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from inspect import signature

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh

import ringdp
from ringdp import CollectiveMismatch, CollectiveTimeout, Communicator, PeerLost, UsageError, Work
from ringdp.comm import rendezvous
from ringdp.comm.backend.works import GroupWork
from tests.comm.backend.jobs import world
from tests.forks import CALL_TIMEOUT, Report, store
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def summed(group: dist.ProcessGroup | None = None) -> float:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return x[0].item()


@on_ranks(2, pool="forked")
def test_groups_can_be_created_again_in_the_same_store(comm: Communicator) -> None:
    """All groups use one store, as torchrun keeps for all restarts of a job."""
    for _ in range(3):
        dist.init_process_group("ringdp")
        assert summed() == 2
        dist.destroy_process_group()
    dist.init_process_group("cpu:ringdp,cuda:ringdp")
    assert summed() == 2
    comm.barrier()  # both have their sum; a rank that still waited could notice the abort there
    if comm.rank == 0:
        with pytest.raises(PeerLost, match="rank 1 has aborted") as caught:
            dist.barrier()
        assert isinstance(caught.value, RuntimeError)  # scripts catch RuntimeError
    dist.distributed_c10d._abort_process_group()
    dist.init_process_group("ringdp")
    assert summed() == 2
    dist.destroy_process_group()


@on_ranks(2, pool="forked")
def test_a_groups_own_timeout_limits_its_creation(comm: Communicator) -> None:
    given_up = "until the timeout of 0.3 s; of its ranks, 1 did not come", "rank 0 gave up waiting"
    with world(comm, "ringdp"):
        for late in (False, True):
            if late == (comm.rank == 1):
                with pytest.raises(CollectiveTimeout, match=given_up[comm.rank]):
                    dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
            comm.barrier()


def create_a_group_after_a_death(comm: Communicator, report: Report, dead: int) -> None:
    dist.init_process_group("ringdp", timeout=timedelta(seconds=CALL_TIMEOUT))
    dist.barrier()
    comm.barrier()  # both have left the first group's barrier
    if comm.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as caught:
        dist.new_group([0, 1], timeout=timedelta(seconds=CALL_TIMEOUT))
    report(str(caught.value))
    dist.destroy_process_group()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_died_before_a_group_is_created_is_named(forks, dead: int):
    """Instead of after the group's timeout, 30 minutes by default."""
    (text,) = forks(2, create_a_group_after_a_death, dead)[1 - dead].reported
    assert text == f"rank {1 - dead} of 2 waited to make a communicator; rank {dead} has ended"


@on_ranks(4, pool="forked")
def test_meshes_split_groups_and_subgroups(comm: Communicator) -> None:
    with world(comm, "ringdp") as everybody:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        assert summed(mesh["rows"].get_group()) == summed(mesh["columns"].get_group()) == 2
        mine = [0, 2] if comm.rank % 2 == 0 else [3, 1]
        half = everybody.split_group(
            mine, timedelta(seconds=CALL_TIMEOUT), group_name=f"half {comm.rank % 2}"
        )
        assert (half.size(), half.group_name) == (2, f"half {comm.rank % 2}")
        assert half.rank() == mine.index(comm.rank)
        ranks = torch.empty(2, dtype=torch.int64)
        half.all_gather_single(ranks, torch.tensor([comm.rank])).wait()
        assert ranks.tolist() == mine
        one = everybody.split_group([1])
        assert (one is None) == (comm.rank != 1)
        third = dist.new_group([2, 0, 1], backend="ringdp")
        assert comm.rank == 3 or summed(third) == 3
        everybody.monitored_barrier(timedelta(seconds=CALL_TIMEOUT))
        half.shutdown()


@on_ranks(1, pool="forked")
def test_a_group_lists_its_devices_for_python_only(comm: Communicator) -> None:
    """torch's C++ would look for a backend per device, to attach hooks to."""
    with world(comm, "ringdp") as group:
        assert [d.type for d in group._device_types] == ["cpu", "cuda"]
        assert not dist.ProcessGroup._device_types.fget(group)
        assert group.get_backend(torch.device("cpu")) is group


@on_ranks(1, pool="forked")
def test_torch_uses_the_backend_only_for_devices_of_its_build(comm: Communicator) -> None:
    with world(comm, "ringdp"):
        cuda = ",cuda:ringdp" * torch.backends.cuda.is_built()
        assert dist.get_backend_config() == f"cpu:ringdp{cuda}"


@on_ranks(2, pool="forked")
def test_futures_and_coalescing_work(comm: Communicator) -> None:
    with world(comm, "ringdp") as group:
        x = torch.full((100_000,), comm.rank + 1.0)
        doubled = dist.all_reduce(x, async_op=True).get_future().then(lambda f: 2 * f.value()[0][0])
        use_subgroups = [torch.empty(2) for _ in range(comm.size)]
        work = dist.all_gather(use_subgroups, torch.full((2,), float(comm.rank)), async_op=True)
        gathered = work.get_future().wait()
        assert [p.tolist() for p in gathered] == [[0.0] * 2, [1.0] * 2]
        assert gathered is not use_subgroups
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert doubled.wait().item() == 6
        assert dist.barrier(async_op=True).wait(CALL_TIMEOUT)
        if comm.rank == 0:
            got = torch.empty(1)
            future = dist.irecv(got, 1).get_future()
            assert not future.done()
            dist.barrier()
            assert future.wait()[0].item() == 5
        else:
            dist.barrier()
            dist.send(torch.tensor([5.0]), 0)
        y, z = torch.ones(2), torch.ones(3)
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([y])
        group.broadcast(z, 1)
        group._end_coalescing(torch.device("cpu")).wait()
        assert y.tolist() == [2.0, 2.0]


class SlowWork(Work):
    """Takes 20 ms, and records its timeout."""

    def __init__(self) -> None:
        self.limit: float | None = None

    def wait(self, timeout: float | None = None) -> None:
        self.limit = timeout
        time.sleep(0.02)


def test_coalesced_works_share_one_timeout():
    first, second = works = SlowWork(), SlowWork()
    GroupWork(works, (), (), 60.0, None).wait()
    assert second.limit <= first.limit - 0.02 < 60


def fail(comm: Communicator, report: Report, how: str) -> None:
    dist.init_process_group("ringdp", timeout=timedelta(seconds=CALL_TIMEOUT))
    dist.barrier()
    comm.barrier()  # both have left the first group's barrier
    if how == "dies" and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(3 + comm.rank * (how == "differs")), async_op=True)
    future = work.get_future()
    with pytest.raises(FAILURES[how]) as caught:
        work.wait()
    report(str(caught.value))
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match=FAILURES[how].__name__):
        future.wait()
    with pytest.raises(FAILURES[how]):
        dist.barrier()
    dist.destroy_process_group()


FAILURES = {"differs": CollectiveMismatch, "dies": PeerLost}


@pytest.mark.parametrize("how", FAILURES)
def test_an_error_is_raised_by_wait_and_by_the_future(forks, how):
    first, second = forks(2, fail, how)
    assert first.code == 0
    assert "test_torch_groups.py" in first.reported[0]  # the user's line
    assert second.code == (0 if how == "differs" else -signal.SIGKILL)


@on_ranks(2, pool="forked")
def test_a_late_rank_is_named_after_the_timeout(comm: Communicator) -> None:
    """Rank 1 does not make the calls that rank 0 waits for."""
    talk = store()
    short = timedelta(milliseconds=30)
    calls = {
        "monitored_barrier": lambda: dist.group.WORLD.monitored_barrier(short),
        "all_reduce": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(short),
        "seconds": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(0.03),
    }
    if "timeout" in signature(dist.barrier).parameters:
        calls["barrier"] = lambda: dist.barrier(timeout=short)
    for name, call in calls.items():
        dist.init_process_group("ringdp", timeout=timedelta(seconds=CALL_TIMEOUT))
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match="rank 1 has not called it"):
                call()
            talk.set(f"late {name}", "")
        talk.wait([f"late {name}"])
        dist.distributed_c10d._abort_process_group()


@pytest.mark.parametrize("rank", [2, 5])
def test_a_rank_outside_the_world_is_refused_at_once(rank: int):
    with pytest.raises(UsageError, match=rf"rank is {rank}; world_size is 2: ranks are 0\.\.1"):
        dist.init_process_group(
            "ringdp",
            store=dist.HashStore(),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=CALL_TIMEOUT),
        )
    assert not dist.is_initialized()


@on_ranks(2, pool="forked")
def test_ranks_on_two_hosts_are_refused_with_an_alternative(comm: Communicator) -> None:
    me, there = comm.rank, 1 - comm.rank
    message = f"^rank {me} is on host host{me}, rank {there} on host{there}: .*gloo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host", lambda: f"host{me} {me}")
        with pytest.raises(RuntimeError, match=message):
            dist.init_process_group("ringdp")


def started_by_torch(rank: int, path: str) -> None:
    ringdp.init  # noqa: B018  the import is what registers the backend
    dist.init_process_group("ringdp", init_method=f"file://{path}", rank=rank, world_size=2)
    assert summed() == 2.0
    dist.destroy_process_group()


def test_processes_started_by_torch_can_use_the_backend(tmp_path):
    path = str(tmp_path / "store")
    started = processes.start_processes(
        started_by_torch, (path,), nprocs=2, join=False, start_method="forkserver"
    )
    until = time.monotonic() + 600
    try:
        while not started.join(until - time.monotonic()):  # true once all have ended
            assert time.monotonic() < until, "the calls hang"
    finally:
        for process in started.processes:
            process.kill()
