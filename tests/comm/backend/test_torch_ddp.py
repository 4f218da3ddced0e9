"""torch's own DDP over the backend: join, communication hooks with futures, torch.compile and the
profiler give what they give over gloo."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ringdp import Communicator, PeerLost, Work
from ringdp.comm.backend import moves, works
from ringdp.comm.backend.buckets import SWAPS
from ringdp.comm.backend.works import GroupWork, Watcher, all_of
from tests.comm.backend.jobs import world
from tests.forks import Report
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4))


def gradients(model: nn.Module) -> list[float]:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()


def rows(rank: int) -> Tensor:
    return torch.arange(12.0).view(2, 6) / (1 + rank)


def backwards(model: nn.Module, rank: int, times: int) -> list[float]:
    found = []
    for _ in range(times):
        model.zero_grad()
        model(rows(rank)).sum().backward()
        found += gradients(model)
    return found


def joined(rank: int) -> list[float]:
    """Rank 1 has more batches; gradients are averaged over the ranks still taking part."""
    model = DistributedDataParallel(net())
    with model.join(divide_by_initial_world_size=False):
        return backwards(model, rank, 2 + 2 * rank)


def power_sgd(rank: int) -> list[float]:
    """The hook issues its second all_reduce, and waits for it, in a callback of the first."""
    model = DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return backwards(model, rank, 4)


def compressed_in_cpp(rank: int) -> list[float]:
    model = DistributedDataParallel(net())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return backwards(model, rank, 3)


def in_a_callback(rank: int) -> list[float]:
    """Like power_sgd, but the first all_reduce has not completed when the callback is added."""
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
    first = dist.all_reduce(torch.ones(3), async_op=True).get_future()

    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        time.sleep(0.05 * rank)  # still in progress on rank 0 when its future is requested
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    second = first.then(again)
    if rank == 0:
        dist.send(torch.zeros(1), 1)
    return second.wait().tolist()


def compiled(rank: int) -> list[float]:
    """DDP's forward is compiled, and rebuilds its buckets from C++ inside it."""
    model = torch.compile(DistributedDataParallel(net()), backend="eager")
    return backwards(model, rank, 3)


CASES = {f.__name__: f for f in (joined, power_sgd, compressed_in_cpp, in_a_callback, compiled)}


def run_over_both_backends(comm: Communicator, report: Report) -> None:
    for backend in ("gloo", "ringdp"):
        with world(comm, backend):
            for name, case in CASES.items():
                torch._dynamo.reset()
                report((backend, name, case(comm.rank)))


def test_ddp_features_equal_those_over_gloo(forks):
    for ended in forks(2, run_over_both_backends):
        assert ended.code == 0
        found = {(backend, name): values for backend, name, values in ended.reported}
        for name in CASES:
            assert found["ringdp", name] == found["gloo", name]
            assert any(found["ringdp", name])


@on_ranks(2, pool="forked")
def test_the_profiler_sees_collectives(comm: Communicator) -> None:
    model, steps = net(), 3
    with world(comm, "ringdp"):
        ddp = DistributedDataParallel(copy.deepcopy(model))
        with torch.profiler.profile() as profile:
            for _ in range(steps):
                ddp(rows(comm.rank)).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["ringdp:all_reduce"] == steps


class Span:
    """Stands in for torch's record_function, which crashes if the profiler has stopped before it
    ends."""

    has_ended = False

    def _call_end_callbacks_on_future(self, future: torch.futures.Future[None]) -> None:
        def end(_: torch.futures.Future[None]) -> None:
            self.has_ended = True

        future.add_done_callback(end)


@on_ranks(2)
def test_a_span_of_the_profiler_has_ended_when_its_work_was_waited_for(comm: Communicator) -> None:
    span, x = Span(), torch.ones(3)
    with (
        world(comm, "ringdp"),
        mock.patch.object(moves, "span_of", return_value=span),
        mock.patch.object(works, "spawn"),  # its thread is late
    ):
        if comm.rank == 0:
            work = dist.irecv(x, 1)
            comm.barrier()
            assert not span.has_ended
            work.wait()
            assert span.has_ended
        else:
            comm.barrier()
            dist.send(x, 0)


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("look", [GroupWork.outcome, GroupWork.is_completed])
def test_a_span_of_the_profiler_has_ended_when_its_work_has_failed(
    look: Callable[[GroupWork], Any], coalesced: bool
) -> None:
    span, late, part = Span(), mock.Mock(Watcher), mock.Mock(Work)
    part.is_completed.return_value, part.exception.return_value = False, None
    work = GroupWork([part], [], watcher=late)
    work.end_span(span)
    seen = all_of([work], late) if coalesced else work
    assert not seen.is_completed()
    assert not span.has_ended
    part.is_completed.return_value = True
    part.exception.return_value = part.wait.side_effect = PeerLost("rank 1 has ended")
    assert look(seen)
    assert span.has_ended


def lies_shared(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    arena = group._comm._transport.arena
    return arena.address <= tensor.data_ptr() < arena.address + arena.bytes


def wide(**options: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(512, 512), gradient_as_bucket_view=True, **options)


def stepped(model: nn.Module, rank: int) -> Tensor:
    model.zero_grad(set_to_none=False)
    model(torch.full((2, 512), 1.0 + rank)).sum().backward()
    return model.module.weight.grad


def check_buckets_in_arena(comm: Communicator, report: Report) -> None:
    for backend in ("gloo", "ringdp"):
        with world(comm, backend) as group:
            model = wide()
            places = []
            for _ in range(3):  # the buckets are rebuilt once, after the first step
                grad = stepped(model, comm.rank)
                places.append(grad.data_ptr())
                report((backend, grad.sum().item(), backend == "gloo" or lies_shared(group, grad)))
            assert places[1] == places[2]


@pytest.mark.skipif(not SWAPS, reason="this torch cannot move a storage")
def test_buckets_lie_in_the_arena(forks):
    for ended in forks(2, check_buckets_in_arena):
        assert ended.code == 0
        numbers = {
            b: [n for backend, n, _ in ended.reported if backend == b] for b in ("gloo", "ringdp")
        }
        assert numbers["ringdp"] == numbers["gloo"]
        assert all(in_arena for _, _, in_arena in ended.reported)


@on_ranks(2, pool="forked")
def test_a_tensor_with_a_numpy_view_is_not_moved(comm: Communicator) -> None:
    mine = torch.zeros(1 << 18)
    seen = mine.numpy()

    def reduce(grad: Tensor) -> None:
        mine.fill_(1)
        dist.all_reduce(mine)
        dist.group.WORLD.allreduce([mine]).wait()

    with world(comm, "ringdp") as group:
        model = wide()
        model.module.bias.register_hook(reduce)
        stepped(model, comm.rank)
        assert not lies_shared(group, mine)
        assert seen[0] == 4
