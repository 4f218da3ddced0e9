"""torch's own gradient clipping, norms and GradScaler on a sharded model: the results of one
process."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import ringdp
from ringdp import Communicator, Precision, UsageError
from tests.parallel.small import (
    COMPUTE_IN_FLOAT64,
    assert_equal,
    loss,
    net,
    with_and_without_precision,
    within_step,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def by_hand(parameters: list[Any]) -> Tensor:
    """As loops did before torch had a function for it, and many still do."""
    norm = torch.norm(torch.stack([torch.norm(p.grad.detach(), 2.0) for p in parameters]), 2.0)
    for p in parameters:
        p.grad.detach().mul_(0.1 / (norm + 1e-6))
    return norm


def replaced(parameters: list[Any]) -> Tensor:
    for p in parameters:
        p.grad = torch.cat([p.grad, p.grad])[: len(p.grad)] / 2
    return clip_grad_norm_(parameters, 0.1)


def logged(parameters: list[Any]) -> Tensor:
    norms = [p.grad.norm() for p in parameters]
    norms += [torch.linalg.norm(p.grad) for p in parameters]
    norms += [torch.linalg.vector_norm(p.grad, math.inf) for p in parameters]
    norms += [get_total_norm([p.grad.float() for p in parameters], 3.0)]
    clip_grad_value_(parameters, 0.01)
    return torch.stack([n.float() for n in norms])


CLIPS: dict[str, Callable[[list[Any]], Tensor]] = {
    "2": lambda ps: clip_grad_norm_(ps, 0.1),
    "1": lambda ps: clip_grad_norm_(ps, 0.1, norm_type=1.0),
    "inf": lambda ps: clip_grad_norm_(ps, 0.01, norm_type="inf"),
    "foreach": lambda ps: clip_grad_norm_(iter(ps), 0.1, foreach=True),
    "each": lambda ps: torch.stack([clip_grad_norm_(p, 0.03) for p in ps]),
    "by hand": by_hand,
    "replaced": replaced,
    "logged": logged,
}


def train(model: nn.Module, clip: Callable[[list[Any]], Tensor]) -> list[list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    norms = []
    for step in range(2):
        loss(model, step).backward()
        norms.append(clip(list(model.parameters())).detach().flatten().tolist())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@with_and_without_precision
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3)
def test_torchs_clipping_equals_that_of_one_process(
    comm: Communicator, stage: int, precision: Precision | None
) -> list[Any]:
    found = []
    for name, clip in CLIPS.items():
        model, twin = net(), net()
        engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
        norms, exact = train(model, clip), train(twin, clip)
        torch.testing.assert_close(norms, exact, msg=name)
        with engine.full_parameters():
            torch.testing.assert_close(model.state_dict(), twin.state_dict(), msg=name)
        engine.close()
        found.append(norms)
    return found


@with_and_without_precision
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3)
def test_norms_after_a_forward_equal_those_of_one_process(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """Clips after another forward without a backward, such as one whose loss is only logged."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    norms = []
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        loss(m).backward()
        loss(m)
        norms.append(clip_grad_norm_(m.parameters(), 0.1))
        optimizer.step()
    torch.testing.assert_close(*norms)
    assert_equal(engine, twin)
    with engine.no_sync():
        loss(model).backward()
    loss(model)
    with pytest.raises(UsageError, match="norm of gradients is taken, but gradients made within"):
        clip_grad_norm_(model.parameters(), 0.1)
    engine.close()


def norms_of(model: nn.Module) -> list[Tensor]:
    """Norms of parameters, computed in the ways used for logging."""
    ps = list(model.parameters())
    norms = [x.norm(math.inf) for p in ps for x in (p.data, p.detach().float())]
    with torch.no_grad():
        norms += [f(p) for p in ps for f in (torch.norm, torch.linalg.vector_norm, Tensor.norm)]
        return [*norms, get_total_norm(ps), get_total_norm([p * 2 for p in ps], 1.0)]


@with_and_without_precision
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(3)
def test_norms_of_parameters_equal_those_of_one_process(
    comm: Communicator, stage: int, precision: Precision | None
) -> list[Tensor]:
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    with engine.no_sync():  # accumulates gradients, which must not affect norms of parameters
        loss(model).backward()
    for m in (model, twin):
        m[1].requires_grad_(False)
    frozen, exact = (torch.norm(input=m[1][0].weight) for m in (model, twin))
    torch.testing.assert_close(frozen, exact)
    norms = norms_of(model)
    torch.testing.assert_close(norms, norms_of(twin))
    if stage:
        weight = model[0][0].weight
        for use in (weight.norm, lambda: weight.detach() * weight):
            with pytest.raises(UsageError, match="outside the forward"):
                use()
    with engine.full_parameters():
        torch.testing.assert_close(norms_of(model), norms)
    engine.close()
    return norms


class SkippedError(Exception):
    """Raised and caught by the test below."""


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3)
def test_norms_are_right_after_a_step_that_raised(comm: Communicator, stage: int) -> None:
    """A step that raises, for instance for lack of memory, then one that does not."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    optimizer = torch.optim.SGD(model.parameters())

    def refuse() -> None:
        raise SkippedError

    for m in (model, twin):
        loss(m).backward()
    with pytest.raises(SkippedError):
        within_step(optimizer, refuse)
    optimizer.step()
    norm, exact = (get_total_norm([p.grad for p in m.parameters()]) for m in (model, twin))
    torch.testing.assert_close(norm, exact)
    engine.close()


# ---- GradScaler


def train_with_scaler(model: nn.Module, optimizer: Any) -> list[float]:
    """The second of three backwards overflows in one element, which one rank owns."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales = []
    for step in range(3):
        handle = model.get_parameter("2.0.weight").register_hook(
            lambda g, step=step: g.index_fill(0, torch.tensor([5]), math.inf) if step == 1 else g
        )
        scaler.scale(loss(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        handle.remove()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(
    ("stage", "precision", "fused"),
    [
        (0, None, False),
        (1, COMPUTE_IN_FLOAT64, False),
        (2, None, True),
        (3, None, False),
        (3, COMPUTE_IN_FLOAT64, True),
    ],
)
@on_ranks(2)
def test_torchs_scaler_skips_on_all_ranks_or_none(
    comm: Communicator, stage: int, precision: Precision | None, fused: bool
) -> None:
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    for one in (model, twin):
        optimizer = torch.optim.AdamW(one.parameters(), fused=fused)
        assert train_with_scaler(one, optimizer) == [8.0, 4.0, 4.0]
    with engine.full_parameters():
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
    engine.close()


# ---- the gradients themselves


@on_ranks(1)
def test_the_work_of_a_norm_does_not_grow_with_the_model(comm: Communicator) -> None:
    """torch's clipping takes a norm for each parameter."""
    calls = []
    for blocks in (2, 40):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(blocks)))
        engine = ringdp.shard(model, stage=1, comm=comm)
        model(torch.ones(2)).sum().backward()
        gradient, seen = model[0].weight.grad, list[object]()
        gradient.norm()
        sys.setprofile(lambda *_: seen.append(None))  # noqa: B023
        gradient.norm()
        sys.setprofile(None)
        calls.append(len(seen))
        engine.close()
    assert calls[1] < 2 * calls[0]


@with_and_without_precision
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_norms_can_be_taken_after_the_step(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """12 elements, all of them on rank 0."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    twin = copy.deepcopy(model)
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for clear in (False, True):
        found = []
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            one(torch.ones(1, 3)).sum().backward()
            if clear:
                one.weight.grad = None
            optimizer.step()
            there = torch.tensor([int(p.grad is not None) for p in one.parameters()])
            comm.all_reduce(there, "min")  # on every rank, since a norm is collective
            found.append(there.tolist())
        assert found == [[not clear, True]] * 2
        found = [
            [p.grad.norm() for p in one.parameters() if p.grad is not None] for one in (model, twin)
        ]
        torch.testing.assert_close(*found)
    assert not optimizers[0].state
    engine.close()
