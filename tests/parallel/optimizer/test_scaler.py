"""Loss scaling: an overflow on one rank skips the step on all, and scaling changes no bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import ringdp
from ringdp import Communicator, LossScaler, Precision
from tests.equal import equal
from tests.parallel.small import batch, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(3)
def test_a_step_that_overflows_anywhere_is_skipped_everywhere(
    comm: Communicator, stage: int
) -> None:
    """Rank 1's third batch overflows float16; no rank steps then."""
    model = net()
    engine = ringdp.shard(
        model, stage=stage, precision=Precision(HALF, FLOAT, output=FLOAT), comm=comm
    )
    optimizer = ringdp.AdamW(model.parameters())
    scaler = LossScaler(engine, scale=2.0**8, interval=2)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        x = batch(comm.rank) * (1e6 if (step, comm.rank) == (2, 1) else 1)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(x).square().mean()).backward()
        if scaler.unscale_():
            ringdp.clip_grad_norm_(engine, 1.0)
        stepped = scaler.step(optimizer)
        changed = any(
            not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)
        )
        assert changed == stepped or not any(p.numel() for p in before)
        seen.append((stepped, scaler.current))
    other = LossScaler(engine)
    other.load_state_dict(scaler.state_dict())
    assert (other.current, other.good, other.skipped) == (256.0, 1, 1)
    engine.close()
    assert seen == [(True, 256.0), (True, 512.0), (False, 256.0), (True, 256.0)], seen


def test_hysteresis_delays_the_fall_of_the_scale():
    """As with DeepSpeed: overflows count since the scale last grew, even with good steps between
    them."""
    with ringdp.init() as comm:
        model = net()
        engine = ringdp.shard(model, stage=0, comm=comm)
        scaler = LossScaler(engine, scale=2.0**8, interval=2, hysteresis=2)
        scales = []
        for overflows in (1, 0, 1, 1, 0, 0, 1, 1):
            model.zero_grad()
            scaler.scale(model(batch(0)).mean() * (math.inf if overflows else 1.0)).backward()
            scaler.unscale_()
            scales.append(scaler.current)
            other = LossScaler(engine, scale=2.0**8, interval=2, hysteresis=2)
            other.load_state_dict(scaler.state_dict())
            scaler = other
        assert scales == [256, 256, 128, 64, 64, 128, 128, 64]
        engine.close()


@on_ranks(1)
def test_gradients_are_unscaled_whatever_torchs_default_dtype(comm: Communicator) -> None:
    model = net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    model(batch(0)).square().mean().backward()
    try:
        torch.set_default_dtype(torch.float64)
        assert LossScaler(engine).unscale_()
    finally:
        torch.set_default_dtype(FLOAT)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_gradients_are_unscaled_once_per_backward(comm: Communicator, stage: int) -> None:
    """Once after each backward, for two optimizers, and also without a step. An overflow lowers the
    scale even if no optimizer steps."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model[0], model[2]))
    plain = torch.optim.SGD([*twin[0].parameters(), *twin[2].parameters()], lr=0.1)
    scaler = LossScaler(engine, scale=2.0**8, interval=2)
    scales = []
    for overflow in (1.0, float("inf"), 1.0):
        model.zero_grad(), twin.zero_grad()
        (scaler.scale(model(batch(0)).square().mean()) * overflow).backward()
        if scaler.unscale_() and not scales:
            assert scaler.step(first)
            assert scaler.step(second)
        scales.append(scaler.current)
        twin(batch(0)).square().mean().backward()
        if len(scales) == 1:
            plain.step()
    assert scales == [256.0, 128.0, 128.0]
    norm = nn.utils.get_total_norm([p.grad for p in twin.parameters()])
    assert ringdp.clip_grad_norm_(engine, 1e9) == pytest.approx(norm.item(), rel=1e-5)
    with engine.full_parameters():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)
        engine.close()


@on_ranks(2)
def test_scaling_by_powers_of_two_is_exact(comm: Communicator) -> None:
    out = []
    for scale in (1.0, 2.0**10):
        model = net()
        engine = ringdp.shard(model, stage=3, comm=comm)
        optimizer, scaler = ringdp.AdamW(model.parameters()), LossScaler(engine, scale=scale)
        scaler.scale(model(batch(comm.rank)).square().mean()).backward()
        scaler.step(optimizer)
        out.append([p.detach().clone() for p in model.parameters()])
        engine.close()
    assert equal(*out)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.5},
        {"scale": float("inf")},
        {"scale": float("nan")},
        {"growth": 0.5},
        {"growth": float("inf")},
        {"backoff": 2.0},
        {"backoff": 0.0},
        {"interval": 0},
        {"interval": -1},
        {"interval": 2.5},
        {"minimum": 0.0},
        {"hysteresis": 0},
    ],
)
def test_wrong_options_of_a_scaler_are_refused(options):
    with pytest.raises(ringdp.UsageError, match="scale >= minimum > 0"):
        LossScaler(None, **options)


def test_a_scaler_has_torchs_defaults_and_can_be_constant():
    with ringdp.init() as comm:
        engine = ringdp.shard(nn.Linear(2, 2), stage=0, comm=comm)
        ours, torchs = LossScaler(engine), torch.amp.GradScaler("cpu")
        found = ours.current, ours.growth, ours.backoff, ours.interval
        assert found == (
            torchs.get_scale(),
            torchs.get_growth_factor(),
            torchs.get_backoff_factor(),
            torchs.get_growth_interval(),
        )
        LossScaler(engine, scale=1.0, growth=1.0, backoff=1.0, interval=1, minimum=1.0)
        engine.close()
