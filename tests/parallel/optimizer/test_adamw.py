"""AdamW: adjacent parameters are stepped as one, with the bits that each has alone; closures,
states, refusals."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import AdamW, ZeroRedundancyOptimizer
from ringdp.errors import UsageError
from tests.parallel.small import batch, net

SIZES = (5, 16, 1)
Place = Callable[[Tensor], list[Tensor]]


def values(seed: int) -> Tensor:
    return torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed))


def separate(flat: Tensor) -> list[Tensor]:
    return [part.clone() for part in flat.split(SIZES)]


def of_one_storage(flat: Tensor) -> list[Tensor]:
    return list(flat.split(SIZES))


def of_a_storage_each(flat: Tensor) -> list[Tensor]:
    """Adjacent storages, as an allocator may place them."""
    return [torch.from_numpy(part) for part in np.split(flat.numpy(), np.cumsum(SIZES)[:-1])]


def train(place: Place, skips: int | None = None) -> tuple[list[nn.Parameter], AdamW]:
    """Three steps; parameter `skips` has no gradient in the second one."""
    params = [nn.Parameter(x) for x in place(values(0))]
    optimizer = AdamW(params, lr=0.1)
    for step in range(3):
        for i, (p, grad) in enumerate(zip(params, place(values(1 + step)), strict=True)):
            p.grad = None if step == 1 and i == skips else grad
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("skips", [None, 0, 1, 2])
@pytest.mark.parametrize("place", [of_one_storage, of_a_storage_each])
def test_adjacent_parameters_get_the_bits_of_separate_ones(place: Place, skips: int | None) -> None:
    got, optimizer = train(place, skips)
    want, alone = train(separate, skips)
    for i, (p, q) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(p, q)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[p][key], alone.state[q][key])
        assert optimizer.state[p]["step"] == (2 if i == skips else 3)


def test_adjacent_parameters_go_on_from_the_state_of_separate_ones() -> None:
    """As a checkpoint's: each parameter has moments in memory of its own."""
    got, optimizer = train(of_one_storage)
    want, alone = train(separate)
    optimizer.load_state_dict(deepcopy(alone.state_dict()))
    for _ in range(2):
        optimizer.step()
        alone.step()
    for p, q in zip(got, want, strict=True):
        assert torch.equal(p, q)


def test_parameters_of_any_shape_are_stepped() -> None:
    start, grad = values(0)[:16], values(1)[:16]
    params = [nn.Parameter(start.reshape(shape).clone()) for shape in ((16,), (4, 4), (2, 2, 4))]
    for p in params:
        p.grad = grad.reshape(p.shape).clone()
    AdamW(params).step()
    for p in params[1:]:
        assert torch.equal(p.view(-1), params[0])


@pytest.mark.parametrize("wrong", [torch.ones(4, 2).t(), torch.ones(2, 4, dtype=torch.bfloat16)])
def test_unsupported_parameters_are_refused_before_any_step(wrong: Tensor) -> None:
    good, wrong = nn.Parameter(torch.ones(3)), nn.Parameter(wrong)
    for p in (good, wrong):
        p.grad = torch.ones_like(p)
    optimizer = AdamW([{"params": [good]}, {"params": [wrong]}])
    with pytest.raises(UsageError, match=rf"a parameter that is {wrong.dtype}\[2, 4\] with"):
        optimizer.step()
    assert torch.equal(good, torch.ones(3))
    assert not optimizer.state


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_numbers_out_of_bounds_are_refused(name, value):
    with pytest.raises(UsageError, match=f"{name}={value}"):
        AdamW([torch.ones(2, requires_grad=True)], **{name: value})


def test_a_parameter_twice_is_stepped_twice_as_torch_does() -> None:
    def stepped(make: type[torch.optim.Optimizer]) -> tuple[Tensor, Tensor]:
        p = nn.Parameter(torch.ones(3))
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = make([p, p], lr=0.1)  # type: ignore[call-arg]
        for _ in range(2):
            p.grad = torch.full_like(p, 0.5)
            optimizer.step()
        return p.detach(), optimizer.state[p]["step"]

    (mine, steps), (theirs, same) = stepped(AdamW), stepped(torch.optim.AdamW)
    torch.testing.assert_close(mine, theirs)
    assert steps == same == 4


def test_a_state_of_another_shape_is_used() -> None:
    """As when a flat slice has become a full parameter."""
    want = nn.Parameter(torch.ones(4, 4))
    got = nn.Parameter(torch.ones(16))
    optimizers = [AdamW([p]) for p in (want, got)]
    for step in range(3):
        for p, optimizer in zip((want, got), optimizers, strict=True):
            p.grad = torch.arange(16.0).view(p.shape)
            optimizer.step()
        if step == 0:
            got.data = got.data.view(4, 4)
    assert torch.equal(got, want)


@pytest.mark.parametrize("of", [AdamW, partial(ZeroRedundancyOptimizer, optimizer_class=AdamW)])
def test_closures_compute_the_gradients_of_their_step(of: Callable[..., torch.optim.Optimizer]):
    ringdp.init()
    p, twin = nn.Parameter(values(0)), nn.Parameter(values(0))
    optimizer = of([p])

    def closure() -> Tensor:
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == twin.square().sum()
    twin.square().sum().backward()
    AdamW([twin]).step()
    assert torch.equal(p, twin)


def steps(make, *, state=None) -> tuple[list[Tensor], dict[str, Any]]:
    model = net()
    optimizer = make(model.parameters())
    if state is not None:
        optimizer.load_state_dict(state)
    for i in range(3):
        optimizer.zero_grad()
        model(batch(i)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


def test_adamw_equals_torchs_up_to_rounding_and_exchanges_states():
    mine, state = steps(lambda p: AdamW(p, lr=0.01))
    theirs, torch_state = steps(lambda p: torch.optim.AdamW(p, lr=0.01))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert state["state"].keys() == torch_state["state"].keys()
    a, _ = steps(lambda p: AdamW(p, lr=0.01), state=torch_state)
    b, _ = steps(lambda p: torch.optim.AdamW(p, lr=0.01), state=state)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_adjacent_parameters_are_stepped_in_one_call(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        "ringdp.parallel.optimizer.adamw.adamw", lambda p, *_, **__: sizes.append(p.numel())
    )
    flat, grads = torch.zeros(12), torch.ones(12)
    parts = [nn.Parameter(x) for x in flat.split(3)]
    for p, g in zip(parts, grads.split(3), strict=True):
        p.grad = g
    AdamW(parts).step()
    optimizer = AdamW([{"params": parts[:1]}, {"params": parts[1:], "lr": 0.1}])
    parts[2].grad = None
    optimizer.step()
    parts[2].grad = grads[6:9]
    optimizer.step()  # the third is a step behind
    assert sizes == [12, 3, 3, 3, 3, 3, 3, 3]


def test_autograd_sees_a_joint_step_as_a_change_of_each_parameter():
    flat, gradients = torch.ones(2, 4), torch.ones(2, 4)
    parameters = [nn.Parameter(torch.empty(0)) for _ in range(2)]
    for p, values, gradient in zip(parameters, flat, gradients, strict=True):
        p.data, p.grad = values, gradient
    sums = [p.square().sum() for p in parameters]
    AdamW(parameters).step()
    assert torch.all(flat < 1)
    for s in sums:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            s.backward()
