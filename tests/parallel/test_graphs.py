"""Autograd graphs beyond one backward each: gradient penalties, graphs reused after a step,
autocast around several, torch.func. The reference is one process, or what it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Offload, Precision, UsageError
from tests.equal import equal
from tests.parallel.small import (
    WIDTH,
    assert_equal,
    assert_trains,
    batch,
    loss,
    with_and_without_precision,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

STEPS = 3
Loop = Callable[[nn.Module, Any], None]


def critic() -> nn.Sequential:
    """The last unit's slice is empty on one rank; a LayerNorm's graph saves its weight itself."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


# ---- penalties


def penalty(model: nn.Module, step: int) -> Tensor:
    x = batch(step).requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    out: Tensor = (g.norm(dim=1) - 1).square().mean()
    return out


def alone(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        penalty(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_a_loss(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        if step % 2:
            value = penalty(model, step) + loss(model, step)
        else:
            value = loss(model, step) + penalty(model, step)
            with torch.no_grad():
                loss(model, step + 7)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()


def after_a_loss(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        loss(model, step).backward()
        penalty(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def of_weights(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        value = loss(model, step)
        weights = list(model.parameters())
        gradients = torch.autograd.grad(value, weights, create_graph=True)
        torch.stack([g.square().sum() for g in gradients]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_both(comm: Communicator, loop: Loop, stage: int, offloads: bool) -> None:
    model, twin = critic(), critic()
    offload = Offload(optimizer=True) if offloads else None
    engine = ringdp.shard(model, stage=stage, offload=offload, comm=comm)
    for one in (model, twin):
        loop(one, torch.optim.SGD(one.parameters(), lr=0.1))
    assert_equal(engine, twin)
    engine.close()


@pytest.mark.parametrize(("stage", "offloads"), [(0, False), (1, False), (2, False), (2, True)])
@pytest.mark.parametrize("loop", [alone, with_a_loss, after_a_loss, of_weights])
def test_gradient_penalties_train_as_in_one_process(ranks, loop, stage, offloads):
    """A penalty alone need not pass the output of a unit whose weights it trains."""
    ranks(2)(train_both, loop, stage, offloads)


# ---- of weights alone


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_gradients_of_weights_without_a_forward_are_local(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """It is no backward of the model: other ranks need not take part, and .grad is unchanged."""
    engine = ringdp.shard(model := critic(), stage=stage, precision=precision, comm=comm)

    def gradients() -> None:
        weights = list(model.parameters())
        made = torch.autograd.grad(sum(w.square().sum() for w in weights), weights)
        assert all(torch.equal(g, 2 * w) for g, w in zip(made, weights, strict=True))

    # parameters are unsharded outside of a forward
    if comm.rank == 0 and not stage and not precision:
        gradients()
    with engine.full_parameters():
        if comm.rank == 0:
            gradients()
    comm.barrier()
    assert all(p.grad is None for p in model.parameters())
    loss(model).backward()
    engine.close()


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_autograd_grad_of_a_forwards_weights_is_local(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """.grad is unchanged."""
    model, twin = critic(), critic()
    held = list(model.parameters())
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)

    def left() -> list[Tensor]:
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def take() -> None:
        value, exact = loss(model, comm.rank), loss(twin, comm.rank)
        expected = torch.autograd.grad(exact, list(twin.parameters()))
        for weights in (held, list(model.parameters())):
            made = torch.autograd.grad(value, weights, retain_graph=weights is held)
            for mine, theirs in zip(made, expected, strict=True):
                torch.testing.assert_close(mine.float(), theirs)

    take()
    assert not left()
    loss(model).backward()
    before = left()
    take()
    assert equal(left(), before)
    engine.close()


# ---- autocast


def autocast_around_all(model: nn.Module, optimizer: Any) -> None:
    """Autocast caches casts, and so keeps the graph of the first forward."""
    with torch.autocast("cpu", torch.bfloat16):
        for step in range(STEPS):
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()


def autocast_around_two(model: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            first, second = loss(model, step), loss(model, step + 7)
        second.backward()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("stage", "offloads"), [(0, False), (2, True), (3, False), (3, True)])
@pytest.mark.parametrize("loop", [autocast_around_all, autocast_around_two])
def test_autocasts_that_outlive_a_backward_train(ranks, loop, stage, offloads):
    """The casts' gradients arrive when all units have finished; in stage 3 they belong to
    slices."""
    ranks(2)(train_both, loop, stage, offloads)


# ---- graphs used again after a step


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_second_backward_after_a_step_is_an_error(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """As torch does. Otherwise, where modules compute with other tensors, new weights would be used
    for old ones."""
    for make in (torch.optim.SGD, ringdp.AdamW):
        engine = ringdp.shard(model := critic(), stage=stage, precision=precision, comm=comm)
        optimizer = make(model.parameters(), lr=0.1)
        value = loss(model)
        value.backward(retain_graph=True)
        value.backward(retain_graph=True)  # nothing has changed
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()
        loss(model).backward()
        engine.close()


# ---- of some parameters


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_backward_to_some_parameters_trains_them(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """With backward(inputs=...), also where modules compute with other tensors than the
    parameters."""
    model, twin = critic(), critic()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    for one in (model, twin):
        chosen = list(one.parameters())[1:4]
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(STEPS):
            loss(one, step).backward(inputs=chosen)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(engine, twin)
    engine.close()


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_gradients_of_inputs_leave_parameters_unchanged(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """They must not become zeros, by which a step would decay weights."""
    engine = ringdp.shard(model := critic(), stage=stage, precision=precision, comm=comm)
    x = batch().requires_grad_()
    sent = engine.reducing.comm.sent_bytes()
    (g,) = torch.autograd.grad(model(x).sum(), x)
    assert not engine.ledger.now["gathered"]
    model(x).sum().backward(inputs=[x])
    torch.testing.assert_close(x.grad, g)
    assert engine.reducing.comm.sent_bytes() == sent
    assert all(p.grad is None for p in model.parameters())
    loss(model).backward()
    loss(twin := critic()).backward()
    for one in (model, twin):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert_equal(engine, twin)
    engine.close()


@with_and_without_precision
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_full_parameters_can_be_differentiated_on_one_rank(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """As in an attack or a saliency map on rank 0. A backward to the parameters is refused."""
    model, twin = critic(), critic()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)

    def derivatives(one: nn.Module) -> list[Tensor]:
        x = batch().requires_grad_()
        (first,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        one(x).sum().backward(inputs=[x])
        return [first.detach(), second, x.grad, *torch.autograd.grad(loss(one), one.parameters())]

    with engine.full_parameters():
        if comm.rank == 0:
            for found, exact in zip(derivatives(model), derivatives(twin), strict=True):
                torch.testing.assert_close(found, exact)
            with pytest.raises(UsageError, match=r"allowed there: torch\.autograd\.grad"):
                loss(model).backward()
    assert all(p.grad is None for p in model.parameters())
    assert_trains(engine, twin)
    engine.close()


# ---- torch.func


@with_and_without_precision
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_torch_func_needs_full_parameters(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    model = critic()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)

    def per_sample(model: nn.Module) -> dict[str, Tensor]:
        def value(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(model, parameters, (x,)).square().mean()
            return out

        found = torch.vmap(torch.func.grad(value), (None, 0))
        out: dict[str, Tensor] = found(dict(model.named_parameters()), batch())
        return out

    if stage or precision:
        with pytest.raises(UsageError, match=r"torch.func .* Call it within full_parameters"):
            per_sample(model)
        with pytest.raises(UsageError, match=r"torch.func"):
            torch.vmap(model)(batch())
        with engine.full_parameters():
            mine = per_sample(model)
    else:
        mine = per_sample(model)
    for name, exact in per_sample(critic()).items():
        torch.testing.assert_close(mine[name], exact)
    loss(model).backward()
    engine.close()
