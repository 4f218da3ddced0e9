"""User hooks on parameters, backwards that raise, and steps within backward. The reference is one
process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Offload
from tests.equal import equal
from tests.parallel.loop_models import Fail
from tests.parallel.small import assert_equal, assert_gradients, batch, loss, net, whole_parameters
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

Loop = Callable[[nn.Module, list[nn.Parameter]], None]


def double(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(2)


def replace(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad * 4


def take_away(p: Tensor) -> None:
    p.grad = None


def freeze(p: Tensor) -> None:
    p.requires_grad_(False)


def hooks_of_tensors(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    shapes = []
    for p in parameters:
        p.register_hook(lambda g: shapes.append(g.shape) or g * 2)
    loss(model).backward()
    assert sorted(shapes) == sorted(p.shape for p in net().parameters())


def hooks_after(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.register_post_accumulate_grad_hook(double)
        p.register_post_accumulate_grad_hook(replace)
    loss(model).backward()


def hook_that_takes_away(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    parameters[2].register_post_accumulate_grad_hook(take_away)
    loss(model).backward()


def hook_that_freezes(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    parameters[2].register_post_accumulate_grad_hook(freeze)
    loss(model).backward()


def hooks_removed(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    handles = [p.register_post_accumulate_grad_hook(double) for p in parameters]
    handles += [p.register_hook(lambda g: g * 8) for p in parameters]
    loss(model).backward()
    for handle in handles:
        handle.remove()
    loss(model, 1).backward()


def another_after_one_that_raises(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    handle = model[1].register_forward_pre_hook(lambda _m, inputs: Fail.apply(inputs[0]))
    first = loss(model)
    handle.remove()
    second = loss(model, 1)
    with pytest.raises(RuntimeError, match="on purpose"):
        first.backward()
    for p in parameters:
        p.grad = None
    second.backward()


def a_hook_that_raises(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    def fail(p: Tensor) -> None:
        raise RuntimeError("on purpose")

    handle = parameters[2].register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss(model).backward()
    handle.remove()
    model.zero_grad()
    loss(model, 1).backward()


def some_inputs_only(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    x = batch().requires_grad_()
    value = model(x).square().mean()
    value.backward(inputs=[x], retain_graph=True)
    value.backward()


def whole_hooks_of_modules(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    for module in model:
        module.register_full_backward_hook(
            lambda _m, gi, _go: tuple(None if g is None else 2 * g for g in gi)
        )
    loss(model).backward()


LOOPS: list[Loop] = [
    hooks_of_tensors,
    hooks_after,
    hook_that_takes_away,
    hook_that_freezes,
    hooks_removed,
    another_after_one_that_raises,
    a_hook_that_raises,
    some_inputs_only,
    whole_hooks_of_modules,
]


@pytest.mark.parametrize(
    ("stage", "offloads"), [(0, False), (1, False), (2, True), (3, False), (3, True)]
)
@pytest.mark.parametrize("at", range(len(LOOPS)), ids=[f.__name__ for f in LOOPS])
@on_ranks(2)
def test_hooks_and_errors_give_the_gradients_of_one_process(
    comm: Communicator, stage: int, offloads: bool, at: int
) -> None:
    loop = LOOPS[at]
    model, twin = net(), net()
    offload = Offload(parameters=stage == 3, optimizer=True) if offloads else None
    engine = ringdp.shard(model, stage=stage, offload=offload, comm=comm)
    try:
        loop(model, list(model.parameters()))
        loop(twin, list(twin.parameters()))
        assert_gradients(engine, twin)
    finally:
        engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_all_that_follows_a_backward_that_raised_starts_afresh(
    comm: Communicator, stage: int
) -> None:
    """Without gradients, neither its own nor those accumulated before."""
    engine = ringdp.shard(model := net(), stage=stage, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole_parameters(engine)
    for follows in (
        torch.no_grad()(lambda: loss(model)),
        optimizer.step,
        lambda: whole_parameters(engine),
    ):
        loss(model).backward()
        handle = model[1].register_forward_pre_hook(lambda _m, inputs: Fail.apply(inputs[0]))
        with pytest.raises(RuntimeError, match="on purpose"):
            loss(model).backward()
        handle.remove()
        follows()
        assert all(p.grad is None for p in model.parameters())
        assert engine.ledger.now["gathered"] == engine.ledger.now["buckets"] == 0
    assert equal(whole_parameters(engine), before)
    engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_closing_waits_for_a_reduction_in_flight(comm: Communicator, stage: int) -> None:
    """Rank 1 reaches the reduction when rank 0, which started it, is already closing."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(800, 800)) for _ in range(3)))
    x = torch.ones(1, 800)
    engine = ringdp.shard(model, stage=stage, comm=comm)

    def late(_: Tensor) -> None:
        if comm.rank == 1:
            time.sleep(0.1)

    def fail(_: Tensor) -> None:
        raise RuntimeError("on purpose")

    next(model[1].parameters()).register_hook(late)
    next(model[0].parameters()).register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(x).sum().backward()
    engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_closing_after_an_abort_does_not_wait(comm: Communicator, stage: int) -> None:
    """Rank 0 never reaches the reduction."""
    with comm.duplicate() as other:
        model = net()
        engine = ringdp.shard(model, stage=stage, comm=other)

        def fail(_: Tensor) -> None:
            raise RuntimeError("on purpose")

        next(model[2 - comm.rank].parameters()).register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            loss(model).backward()
        comm.barrier()  # rank 1 has started it
        other.abort()
        engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_callback_that_autograd_runs_after_the_reductions_may_clip_and_step(
    comm: Communicator, stage: int
) -> None:
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    for one, clip in ((model, ringdp.clip_grad_norm_), (twin, nn.utils.clip_grad_norm_)):
        given: Any = engine if one is model else one.parameters()
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)

        def finish(clip: Any = clip, given: Any = given, optimizer: Any = optimizer) -> None:
            clip(given, 0.01)
            optimizer.step()

        def when_through(_: Tensor, finish: Callable[[], None] = finish) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(finish)

        x = batch().requires_grad_()
        x.register_hook(when_through)  # x gets its gradient last
        one(x).square().mean().backward()
    assert_equal(engine, twin)
    engine.close()


@pytest.mark.parametrize("precision", [None, ringdp.Precision(torch.float64)])
@pytest.mark.parametrize("stage", range(3))
@on_ranks(2)
def test_a_frozen_model_may_be_closed_before_the_backward_through_it(
    comm: Communicator, stage: int, precision: ringdp.Precision | None
) -> None:
    model, twin = net().requires_grad_(False), net()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    x, y = batch().requires_grad_(), batch().requires_grad_()
    value = model(x).square().mean()
    engine.close()
    value.backward()
    twin(y).square().mean().backward()
    torch.testing.assert_close(x.grad, y.grad)
