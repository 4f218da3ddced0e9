"""Mixed precision against casts by hand, loss scaling that skips on all ranks, the optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, LossScaler, Offload, Precision
from ringdp.parallel.precision import Dtypes, cast, dtypes
from tests.parallel import small
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.Linear(9, 9))


def batch(rank: int) -> Tensor:
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(rank))


def test_a_dtype_has_its_default():
    assert dtypes(FLOAT, kept=False, precision=Precision()) == Dtypes(FLOAT, FLOAT, FLOAT)
    assert dtypes(FLOAT, kept=False, precision=Precision(BF16)) == Dtypes(FLOAT, BF16, BF16)
    assert dtypes(FLOAT, kept=False, precision=Precision(BF16, FLOAT)).reduce == FLOAT
    assert dtypes(FLOAT, kept=True, precision=Precision(BF16)) == Dtypes(FLOAT, FLOAT, FLOAT)
    with pytest.raises(ringdp.UsageError, match=r"param=torch.int32"):
        Precision(param=torch.int32)


def test_what_holds_itself_is_refused():
    cyclic: dict[str, object] = {"x": torch.ones(2)}
    cyclic["self"] = [cyclic]
    with pytest.raises(ringdp.UsageError, match="as a dict that holds itself: their tensors"):
        cast(cyclic, torch.bfloat16)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(1)
def test_one_rank_computes_what_casting_by_hand_computes(comm: Communicator, stage: int) -> None:
    """A bfloat16 forward and backward: the dtypes on the way, and the gradients."""
    model, twin, seen = net(), net(), []
    precision = Precision(BF16, FLOAT, output=FLOAT, keep_fp32=nn.LayerNorm)
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    for m in model:
        m.register_forward_pre_hook(lambda m, i: seen.append((m.weight.dtype, i[0].dtype)))
        m.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    out = model(batch(comm.rank))
    assert seen == [(BF16, BF16), BF16, (FLOAT, FLOAT), BF16, (BF16, BF16), BF16]
    assert out.dtype == FLOAT
    out.square().mean().backward()
    first, norm, last = twin
    x = nn.functional.linear(batch(0).to(BF16), first.weight.to(BF16), first.bias.to(BF16))
    x = norm(x.float()).to(BF16)
    x = nn.functional.linear(x, last.weight.to(BF16), last.bias.to(BF16)).float()
    x.square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.dtype == FLOAT
        assert torch.equal(p.grad.flatten(), q.grad.flatten())
    engine.close()


def scaled(comm: Communicator, stage: int) -> list[tuple[bool, float]]:
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
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_overflows_anywhere_is_skipped_everywhere(ranks, stage):
    for seen in ranks(3)(scaled, stage):
        assert seen == [(True, 256.0), (True, 512.0), (False, 256.0), (True, 256.0)]


def test_the_scale_falls_from_the_overflow_on_that_hysteresis_says():
    """As DeepSpeed's: counted since the scale grew, good steps between them or not."""
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


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_gradients_are_unscaled_once_whoever_steps(comm: Communicator, stage: int) -> None:
    """Gradients are unscaled once after each backward: for two optimizers, and where a step is not
    taken. An overflow lowers the scale although nobody steps."""
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


def test_a_step_of_neighbours_is_seen_as_a_change_of_each():
    flat, gradients = torch.ones(2, 4), torch.ones(2, 4)
    parameters = [nn.Parameter(torch.empty(0)) for _ in range(2)]
    for p, values, gradient in zip(parameters, flat, gradients, strict=True):
        p.data, p.grad = values, gradient
    sums = [p.square().sum() for p in parameters]
    ringdp.AdamW(parameters).step()
    assert torch.all(flat < 1)
    for s in sums:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            s.backward()


@on_ranks(2)
def test_scaling_by_powers_of_two_is_exact(comm: Communicator) -> None:
    """A power of two as the scale changes no bit."""
    out = []
    for scale in (1.0, 2.0**10):
        model = net()
        engine = ringdp.shard(model, stage=3, comm=comm)
        optimizer, scaler = ringdp.AdamW(model.parameters()), LossScaler(engine, scale=scale)
        scaler.scale(model(batch(comm.rank)).square().mean()).backward()
        scaler.step(optimizer)
        out.append([p.detach().clone() for p in model.parameters()])
        engine.close()
    assert all(map(torch.equal, *out))


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
def test_a_wrong_scaler_is_told(options):
    with pytest.raises(ringdp.UsageError, match="scale >= minimum > 0"):
        LossScaler(None, **options)


def test_a_scaler_begins_as_torchs_and_may_stay_as_it_is():
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


def test_a_weight_tied_to_one_of_another_dtype_is_told():
    model = nn.Sequential(nn.Embedding(9, 9), nn.Linear(9, 9, bias=False))
    model[1].weight = model[0].weight
    precision = Precision(BF16, keep_fp32=nn.Linear)
    with pytest.raises(ringdp.UsageError, match="a parameter of 1 is tied to one"):
        ringdp.shard(model, stage=3, precision=precision, comm=ringdp.init())


def test_offload_needs_something_to_offload():
    comm = ringdp.init()
    with pytest.raises(ringdp.UsageError, match="needs stage 3"):
        ringdp.shard(net(), stage=2, offload=Offload(parameters=True), comm=comm)
    with pytest.raises(ringdp.UsageError, match="needs 1, 2 or 3"):
        ringdp.shard(net(), stage=0, offload=Offload(optimizer=True), comm=comm)


def norms(comm: Communicator, stage: int) -> tuple[float, float]:
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    model(batch(comm.rank)).square().mean().backward()
    norm = ringdp.clip_grad_norm_(engine, 0.01)
    after = ringdp.clip_grad_norm_(engine, 1e9)
    engine.close()
    return norm, after


def test_the_norm_is_that_of_all_gradients(ranks):
    twin = net()
    for rank in range(3):
        (twin(batch(rank)).square().mean() / 3).backward()
    exact = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e9).item()
    found = {pair for stage in range(4) for pair in ranks(3)(norms, stage)}
    ((norm, after),) = found  # the same bits in all stages on all ranks
    assert norm == pytest.approx(exact, rel=1e-5)
    assert after == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_gradients_that_the_user_has_put_there_are_clipped(comm: Communicator, stage: int) -> None:
    engine = ringdp.shard(model := net(), stage=stage, comm=comm)
    model(batch(comm.rank)).square().mean().backward()
    first, *others = model.parameters()
    first.grad = None
    for p in others:
        p.grad = torch.full_like(p.grad, 2.0)
    elements = sum(p.numel() for p in list(net().parameters())[1:])
    assert ringdp.clip_grad_norm_(engine, 1.0) == pytest.approx(2 * math.sqrt(elements))
    assert all(p.grad.allclose(torch.tensor(elements**-0.5)) for p in others)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_gradients_that_are_put_behind_a_forward_are_stepped(
    comm: Communicator, stage: int
) -> None:
    """That has no backward, and has left other parameters in their places."""
    model, twin = small.net(), small.net()
    engine = ringdp.shard(model, stage=stage, precision=small.APART, comm=comm)
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        small.loss(m).backward()
        small.loss(m)
        for p in m.parameters():
            p.grad = p.grad * 0.5
        optimizer.step()
    small.assert_equal(engine, twin)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_norm_that_is_no_number_clips_as_torch_does(comm: Communicator, stage: int) -> None:
    """Every gradient is NaN then."""
    engine = ringdp.shard(model := net(), stage=stage, comm=comm)
    model(batch(comm.rank)).square().mean().backward()
    next(model.parameters()).grad.fill_(float("nan"))
    assert math.isnan(ringdp.clip_grad_norm_(engine, 1.0))
    assert all(p.grad.isnan().all() for p in model.parameters())
    engine.close()


# ---- the optimizer


def steps(make, *, state=None) -> list[Tensor]:
    model = net()
    optimizer = make(model.parameters())
    if state is not None:
        optimizer.load_state_dict(state)
    for i in range(3):
        optimizer.zero_grad()
        model(batch(i)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


def test_adamw_is_torchs_to_rounding_and_shares_its_state():
    mine, state = steps(lambda p: ringdp.AdamW(p, lr=0.01))
    theirs, torch_state = steps(lambda p: torch.optim.AdamW(p, lr=0.01))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert state["state"].keys() == torch_state["state"].keys()
    a, _ = steps(lambda p: ringdp.AdamW(p, lr=0.01), state=torch_state)
    b, _ = steps(lambda p: torch.optim.AdamW(p, lr=0.01), state=state)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_adamw_steps_neighbours_as_one_and_cuts_where_it_must(monkeypatch):
    sizes = []
    monkeypatch.setattr("ringdp.parallel.optim.adamw", lambda p, *_, **__: sizes.append(p.numel()))
    flat, grads = torch.zeros(12), torch.ones(12)
    parts = [nn.Parameter(x) for x in flat.split(3)]
    for p, g in zip(parts, grads.split(3), strict=True):
        p.grad = g
    ringdp.AdamW(parts).step()
    optimizer = ringdp.AdamW([{"params": parts[:1]}, {"params": parts[1:], "lr": 0.1}])
    parts[2].grad = None
    optimizer.step()
    parts[2].grad = grads[6:9]
    optimizer.step()  # the third is a step behind
    assert sizes == [12, 3, 3, 3, 3, 3, 3, 3]


def test_adamw_refuses_what_it_cannot_do():
    with pytest.raises(ringdp.UsageError, match="nothing below 0"):
        ringdp.AdamW([nn.Parameter(torch.ones(1))], lr=-1.0)
    p = nn.Parameter(torch.ones(1, dtype=BF16))
    p.grad = torch.ones(1, dtype=BF16)
    with pytest.raises(ringdp.UsageError, match="contiguous float32"):
        ringdp.AdamW([p]).step()
