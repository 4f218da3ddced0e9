"""Lifetimes: the ledger equals the storages that exist, collectives are issued ahead of need, and
any optimizer's state is sharded with its slices."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator
from ringdp.parallel.state import State
from tests.parallel.loop_cases import CASES
from tests.parallel.loop_models import batch, loss, net
from tests.parallel.small import assert_gradients
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

# ---- memory


def storages() -> dict[int, int]:
    """Address -> bytes of every storage of floats that Python can reach. (A communicator's own
    tensor, for barriers, is int32.)"""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    live = [t for t in tensors if t.is_floating_point()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["tied", "unequal"])
@on_ranks(3)
def test_the_ledger_equals_the_storages_that_exist(
    comm: Communicator, stage: int, name: str
) -> None:
    """At rest after each step, and after closing with full parameters."""
    before = storages()

    def new() -> int:
        return sum(size for address, size in storages().items() if address not in before)

    torch.manual_seed(0)
    model = CASES[name].make()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(batch()).square().mean().backward()
        optimizer.step()
        m = engine.memory(optimizer)
        assert new() == m.parameters + m.gradients + m.optimizer
    with engine.full_parameters():
        engine.close()
    whole = sum(u.plan.padded for u in engine.units) * 4
    optimizer.zero_grad()
    del engine, optimizer
    assert new() == whole


@pytest.mark.parametrize("name", ["chain", "frozen unit", "unused part of a unit", "called twice"])
@on_ranks(2)
def test_peaks_are_two_units_and_one_bucket_in_any_loop(comm: Communicator, name: str) -> None:
    """Also while gradients accumulate."""
    for stage in range(4):
        torch.manual_seed(0)
        engine = ringdp.shard(model := CASES[name].make(), stage=stage, comm=comm)
        for _ in range(3):
            loss(model(batch())).backward()
        root, *sizes = [u.bytes for u in engine.units]
        peak, most = engine.ledger.peak, max(sizes)
        engine.close()
        # A unit whose backward does not end, or ends after another unit's, keeps its bucket longer.
        longer = most if name in ("unused part of a unit", "called twice") else 0
        assert peak["gathered"] <= root + 2 * most
        assert peak["buckets"] <= root + 2 * most + longer
        assert peak["passing"] <= 2 * root + 3 * most + longer


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_model_closed_with_full_parameters_is_an_ordinary_one(
    comm: Communicator, stage: int
) -> None:
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    loss(model(batch())).backward()
    with engine.full_parameters(), engine.full_parameters():
        engine.close()
    engine.close()  # closing twice is harmless
    assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    for m in (model, twin):
        m.zero_grad()
        loss(m(batch())).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad)
    again = ringdp.shard(copy.deepcopy(model), stage=stage, comm=comm)
    again.close()


@on_ranks(2)
def test_stage_0_after_another_stage_has_no_slices(comm: Communicator) -> None:
    """Norms are of whole gradients. The other stage's optimizer still has states of slices."""
    model, twin = net(), net()
    before = ringdp.shard(model, stage=2, comm=comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    loss(model(batch())).backward()
    optimizer.step()
    with before.full_parameters():
        before.close()
    engine = ringdp.shard(model, stage=0, comm=comm)
    for m in (model, twin):
        loss(m(batch())).backward()
    of_model, of_twin = (
        nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in (model, twin)
    )
    torch.testing.assert_close(of_model, of_twin)
    with pytest.raises(ringdp.UsageError, match="flat slices"):
        optimizer.state_dict()
    engine.close()


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("param", [None, torch.bfloat16])
@on_ranks(1)
def test_a_model_closed_in_stage_0_is_an_ordinary_one(
    comm: Communicator, param: torch.dtype | None, aborted: bool
) -> None:
    """Whatever dtype it computes in, in the middle of an iteration, and after an abort."""
    model = net()
    with comm.duplicate() as other:
        engine = ringdp.shard(model, stage=0, precision=ringdp.Precision(param), comm=other)
        model(batch())
        if aborted:
            other.abort()
        engine.close()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    ringdp.shard(model, stage=1, comm=comm).close()
    with pytest.raises(ringdp.UsageError, match=r"or after close\(\)"):
        model(batch())


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_model_closed_amid_an_iteration_is_of_slices(comm: Communicator, stage: int) -> None:
    """A backward through what stage 3 has freed is an error, frozen as it is."""
    model = net().requires_grad_(False)
    engine = ringdp.shard(model, stage=stage, comm=comm)
    value = loss(model(batch().requires_grad_()))
    engine.close()
    assert all(u.state is State.SHARDED for u in engine.units)
    assert engine.ledger.now["gathered"] == 0
    if stage == 3:
        with pytest.raises(ringdp.CommunicationError, match="the engine was closed"):
            value.backward()


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_closing_after_an_abort_does_not_wait_for_a_gather(comm: Communicator, stage: int) -> None:
    """Rank 1 never reaches it."""
    with comm.duplicate() as other:
        engine = ringdp.shard(net(), stage=stage, comm=other)
        if comm.rank == 0:
            engine.units[1].gather(engine.gathering.comm)
        comm.barrier()
        other.abort()
        engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_an_engine_is_freed_although_the_model_keeps_its_output(
    comm: Communicator, stage: int
) -> None:
    engine = ringdp.shard(CASES["left in an attribute"].make(), stage=stage, comm=comm)
    engine.model(batch())
    engine.close()
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None


# ---- order


class Recorder:
    """Wraps a communicator and records the collectives issued."""

    def __init__(self, comm: Communicator, events: list[tuple[str, int]]) -> None:
        self.comm, self.events = comm, events

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, tag: int, **kwargs: Any) -> Any:
            self.events.append((name, tag))
            return getattr(self.comm, name)(*args, tag=tag, **kwargs)

        return getattr(self.comm, name) if name in ("close", "closed", "ended", "size") else call


def issued_events(comm: Communicator, stage: int, keeps: bool) -> list[tuple[str, int]]:
    """The collectives of the second step as issued, with each block's forward and the end of its
    backward. `keeps`: there are also accumulated gradients of a backward before."""
    model = net()
    engine: Any = ringdp.shard(model, stage=stage, comm=comm)
    events: list[tuple[str, int]] = []
    engine.gathering.comm = Recorder(engine.gathering.comm, events)
    engine.reducing.comm = Recorder(engine.reducing.comm, events)

    def note(module: nn.Module, index: int) -> None:
        module.register_forward_hook(lambda *_: events.append(("forward", index)))
        module.register_forward_pre_hook(
            lambda _m, inputs: (
                inputs[0].register_hook(lambda _g: events.append(("backward", index))) and None
            )
        )

    for i, b in enumerate(model.blocks, start=1):
        note(b, i)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            if keeps:
                with engine.no_sync():
                    loss(model(batch())).backward()
            events.clear()
            loss(model(batch())).backward()
            optimizer.step()
    finally:
        engine.close()
    return events


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_root_without_parameters_has_no_collectives(comm: Communicator, stage: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    events: list[tuple[str, int]] = []
    engine: Any = ringdp.shard(model, stage=stage, unit=nn.Linear, comm=comm)
    engine.gathering.comm = Recorder(engine.gathering.comm, events)
    engine.reducing.comm = Recorder(engine.reducing.comm, events)
    try:
        model(torch.ones(2, 8)).sum().backward()
    finally:
        engine.close()
    assert {unit for _, unit in events} == {1, 2}, events


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_collectives_are_issued_ahead_of_need(ranks, stage, keeps):
    events, other = ranks(2)(issued_events, stage, keeps)
    assert events == other, "every rank issues the same in the same order"
    kind = "all_reduce" if stage == 0 else "reduce_scatter"
    assert [i for name, i in events if name == kind] == [3, 2, 1, 0]
    for i in (3, 2):  # a unit's reduction is in progress while the previous one computes
        assert events.index((kind, i)) < events.index(("backward", i - 1))
    gathers = [i for name, i in events if name == "all_gather"]
    assert gathers == [[], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 2, 1]][stage]
    if stage:
        for i in (1, 2):  # the next unit is being gathered while this one computes
            assert events.index(("all_gather", i + 1)) < events.index(("forward", i))
    if stage == 3:
        backward = events[events.index(("forward", 3)) :]
        for i in (3, 2):
            assert backward.index(("all_gather", i - 1)) < backward.index(("backward", i))


@on_ranks(2)
def test_a_backward_that_raised_has_the_same_gathers_on_all_ranks(comm: Communicator) -> None:
    """Rank 0 starts one when it sees that a reduction is over; rank 1 does not see it in time."""
    model, twin = net(), net()
    engine: Any = ringdp.shard(model, stage=3, comm=comm)
    events: list[tuple[str, int]] = []
    engine.gathering.comm = Recorder(engine.gathering.comm, events)
    engine.reducing.through = lambda: comm.rank == 0

    def fail(_: Tensor) -> None:
        raise RuntimeError("on purpose")

    handle = model.blocks[1][0].weight.register_hook(fail)  # its bias is made before
    with pytest.raises(RuntimeError, match="on purpose"):
        loss(model(batch())).backward()
    assert events[5:] == [("all_gather", 1)][comm.rank :]
    handle.remove()
    for one in (model, twin):
        loss(one(batch())).backward()
    assert_gradients(engine, twin)
    engine.close()


# ---- optimizers


def recipes(parameters: Any) -> list[torch.optim.Optimizer]:
    named = list(parameters)
    groups = [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "bias" in n], "lr": 0.001},
    ]
    flat = [p for _, p in named]
    return [
        torch.optim.AdamW(groups, lr=0.01),
        torch.optim.Adam(flat, lr=0.01, amsgrad=True),
        torch.optim.RMSprop(flat, lr=0.001, momentum=0.5, centered=True),
        torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
        torch.optim.Adagrad(flat, lr=0.01),
    ]


def train_with_all(comm: Communicator, stage: int) -> list[list[float]]:
    out = []
    for i in range(len(recipes(net().named_parameters()))):
        model = net()
        engine = ringdp.shard(model, stage=stage, comm=comm)
        try:
            optimizer = recipes(model.named_parameters())[i]
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.5**e)
            for step in range(4):
                loss(model(batch() + step + comm.rank)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 1)
                schedule.step()
            with engine.full_parameters():
                out.append([x for p in model.parameters() for x in p.detach().flatten().tolist()])
        finally:
            engine.close()
    return out


def test_optimizers_groups_and_schedules_agree_in_all_stages(ranks):
    runs = [ranks(3)(train_with_all, stage)[0] for stage in range(4)]
    assert all(run == runs[0] for run in runs)
