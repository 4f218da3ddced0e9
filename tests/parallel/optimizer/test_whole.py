"""Optimizers that look at whole parameters step a sharded model as they step a whole one: the same
bits, and the same state, in every stage and with any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import CheckpointError, Communicator, Engine, Offload, UsageError
from tests.equal import equal
from tests.parallel.small import (
    COMPUTE_IN_FLOAT64,
    batch,
    loss,
    muon_and_adamw,
    net,
    step,
    whole_parameters,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class Shape:
    """State that no JSON holds, so that only the owner has it."""

    def __init__(self, p: Tensor) -> None:
        self.sizes = p.shape


class Centred(torch.optim.Optimizer):
    """Subtracts from a gradient its mean, and keeps state of every kind."""

    needs_whole_parameters = True

    def __init__(self, params: Any, lr: float = 0.1, *, held: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.held, self.fails = held, False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        out = None if closure is None else torch.enable_grad()(closure)()
        if self.fails:
            raise ZeroDivisionError
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                assert (type(p), type(p.grad)) == (nn.Parameter, Tensor)
                state = self.state[p]
                if not state:
                    state |= {"step": torch.tensor(0.0), "count": 0, "shape": list(p.shape)}
                    state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["rows"] = torch.zeros(p.shape[:1], dtype=torch.float64)
                    state["mean"] = torch.zeros(())
                    state |= {"of": Shape(p)} if self.held else {}
                assert not self.held or state["of"].sizes == p.shape
                state["step"] += 1
                state["count"] += 1
                state["mean"].mul_(0.5).add_(p.grad.mean())
                state["rows"] += p.grad.flatten(1).sum(1) if p.dim() > 1 else p.grad
                state["momentum"] += p.grad - state["mean"]
                p.sub_(state["momentum"] + state["rows"].mean(), alpha=group["lr"])
        return out


def model(seed: int = 0) -> nn.Module:
    """With a 0-dim and an empty parameter, and one whose slice has as many elements as rows."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(1, 19), nn.Tanh(), nn.Linear(19, 7), nn.Linear(7, 1))
    made[1].scale = nn.Parameter(torch.tensor(1.5))
    made[1].none = nn.Parameter(torch.empty(0, 3))
    made[1].register_forward_hook(lambda m, _, y: y * m.scale + m.none.sum())
    return made


def train(model: nn.Module, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        model(batch(seed)[:, :1]).square().mean().backward()
        optimizer.step()


def state_of(engine: Engine, optimizer: Any) -> dict[str, Any]:
    with engine.full_parameters():
        return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("n", [1, 2, 4])  # whose averages of equal gradients are exact
@on_ranks()
def test_bits_are_those_of_one_process(comm: Communicator) -> None:
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, {"precision": COMPUTE_IN_FLOAT64}),
        (3, {"unit": nn.Linear, "offload": Offload(optimizer=True)}),
    ]
    for stage, options in cases:
        twin, engine = model(), ringdp.shard(model(), stage=stage, comm=comm, **options)
        exact, optimizer = (Centred(m.parameters(), held=True) for m in (twin, engine.model))
        train(twin, exact, 0, 1, 2)
        train(engine.model, optimizer, 0, 1, 2)
        assert equal(whole_parameters(engine), twin.parameters()), stage
        engine.close()


@pytest.mark.parametrize("n", [1, 4])  # with one the rows of a [19, 1] have its slice's shape
@on_ranks()
def test_its_state_is_whole_in_a_state_dict(comm: Communicator) -> None:
    twin, engine = model(), ringdp.shard(model(), stage=3, comm=comm)
    exact, optimizer = (Centred(m.parameters()) for m in (twin, engine.model))
    train(twin, exact, 0, 1)
    train(engine.model, optimizer, 0, 1)
    found = state_of(engine, optimizer)
    assert_state(found, exact.state_dict())
    state = exact.state_dict()
    exact, fresh = (Centred(m.parameters()) for m in (twin, engine.model))
    for loading in (exact, fresh):
        loading.load_state_dict(copy.deepcopy(state))  # which casts it
    train(twin, exact, 2)
    train(engine.model, fresh, 2)
    assert equal(whole_parameters(engine), twin.parameters())
    assert_state(state_of(engine, fresh), exact.state_dict())
    engine.close()


def assert_state(found: dict[str, Any], exact: dict[str, Any]) -> None:
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)


def saves(comm: Communicator, path: Path, stage: int) -> None:
    engine = ringdp.shard(model(), stage=stage, comm=comm)
    optimizer = Centred(engine.model.parameters())
    train(engine.model, optimizer, 0, 1)
    ringdp.save(path, engine, optimizer)
    engine.close()


def loads(comm: Communicator, path: Path, stage: int) -> None:
    twin, engine = model(), ringdp.shard(model(1), stage=stage, comm=comm)
    exact, optimizer = (Centred(m.parameters()) for m in (twin, engine.model))
    train(twin, exact, 0, 1)
    ringdp.load(path, engine, optimizer)
    ringdp.save(path / "again", engine, optimizer)  # where several ranks have what one had
    train(twin, exact, 2)
    train(engine.model, optimizer, 2)
    assert equal(whole_parameters(engine), twin.parameters())
    assert_state(state_of(engine, optimizer), exact.state_dict())
    if stage:
        optimizer.needs_whole_parameters = False
        with pytest.raises(CheckpointError, match=r"the shape .* that looks at whole parameters"):
            ringdp.load(path, engine, optimizer)
    engine.close()


@pytest.mark.parametrize(("wrote", "reads"), [((2, 3), (4, 1)), ((4, 1), (1, 0)), ((1, 0), (2, 2))])
def test_a_checkpoint_loads_with_any_ranks_and_stage(ranks, tmp_path, wrote, reads) -> None:
    ranks(wrote[0])(saves, tmp_path, wrote[1])
    ranks(reads[0])(loads, tmp_path, reads[1])


@on_ranks(4)
def test_objects_that_only_the_owner_has_are_not_saved(comm: Communicator, tmp_path: Path) -> None:
    engine = ringdp.shard(model(), stage=3, comm=comm)
    optimizer = Centred([engine.model[2].bias], held=True)
    train(engine.model, optimizer, 0)
    for save in (state_of, partial(ringdp.save, tmp_path)):
        with pytest.raises(
            (UsageError, CheckpointError), match=r"of parameter 2\.bias .*'of' has a Sh"
        ):
            save(engine, optimizer)
    engine.close()


@on_ranks(2)
def test_state_outlasts_a_step_without_a_gradient(comm: Communicator) -> None:
    twin, engine = model(), ringdp.shard(model(), stage=3, comm=comm)
    exact, optimizer = (Centred(m.parameters()) for m in (twin, engine.model))
    for seed in range(3):
        for m, stepper in ((twin, exact), (engine.model, optimizer)):
            m.zero_grad()
            m(batch(seed)[:, :1]).square().mean().backward()
            if seed == 1:
                m[2].zero_grad()
            stepper.step()
    assert equal(whole_parameters(engine), twin.parameters())
    assert_state(state_of(engine, optimizer), exact.state_dict())
    engine.close()


@on_ranks(2)
def test_a_step_that_raised_leaves_slices(comm: Communicator, tmp_path: Path) -> None:
    twin, engine = model(), ringdp.shard(model(), stage=3, comm=comm)
    exact, optimizer = (Centred(m.parameters()) for m in (twin, engine.model))

    def clips() -> None:
        norm = nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
        assert ringdp.clip_grad_norm_(engine, 1e9) == pytest.approx(norm.item())

    acts = (
        optimizer.zero_grad,
        clips,
        lambda: engine.model(batch()[:, :1]),
        lambda: whole_parameters(engine),
        lambda: ringdp.save(tmp_path, engine, optimizer),
        lambda: (optimizer.step(), exact.step()),
    )
    for seed, act in enumerate(acts):
        train(twin, exact, seed)
        train(engine.model, optimizer, seed)
        optimizer.fails = True
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        optimizer.fails = False
        act()
    assert equal(whole_parameters(engine), twin.parameters())
    assert_state(state_of(engine, optimizer), exact.state_dict())
    engine.close()


@pytest.mark.parametrize("kind", [Centred, torch.optim.SGD])
@on_ranks(2)
def test_the_users_step_hooks_see_slices(comm: Communicator, kind: Any) -> None:
    """As between steps: so one clips, and ones that read whole parameters change no step."""
    twin, engine = net(), ringdp.shard(net(), stage=3, comm=comm)
    seen: list[list[Tensor]] = []
    exact, optimizer = (kind(m.parameters(), lr=0.1) for m in (twin, engine.model))
    step(engine.model, optimizer, 0)  # from here on it has the engine's hooks
    step(twin, exact, 0)

    def clips(*_: object) -> None:
        whole_parameters(engine)
        nn.utils.clip_grad_norm_(engine.model.parameters(), 1e-3)

    def reads(*_: object) -> None:
        seen.append(whole_parameters(engine))

    optimizer.register_step_pre_hook(clips)
    optimizer.register_step_post_hook(reads)
    step(engine.model, optimizer, 1)
    exact.zero_grad()
    loss(twin, 1).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 1e-3)
    exact.step()
    for mine, of_one in zip(seen[0], twin.parameters(), strict=True):
        torch.testing.assert_close(mine, of_one.detach())
    engine.close()


@pytest.mark.parametrize("at", ["pre", "post"])
@on_ranks(2)
def test_a_step_hook_closes_the_engine(comm: Communicator, at: str) -> None:
    """Before others. In a pre-hook this drops the gradients, so that the step changes nothing."""
    twin, engine = net(), ringdp.shard(net(), stage=3, comm=comm)
    exact, optimizer = (Centred(m.parameters()) for m in (twin, engine.model))
    last: list[bool] = []

    def closes(*_: object) -> None:
        with engine.full_parameters():
            engine.close()

    for hook in (closes, lambda *_: last.append(engine.closed)):
        getattr(optimizer, f"register_step_{at}_hook")(hook)
    step(engine.model, optimizer, 0)
    if at == "post":
        step(twin, exact, 0)
    assert last == [True]
    assert equal(engine.model.parameters(), twin.parameters())


@on_ranks(2)
def test_muon_beside_adamw_trains_as_in_one_process(comm: Communicator) -> None:
    """With a frozen weight, a clipped and accumulated gradient, and a closure."""
    twin, engine = net(), ringdp.shard(net(), stage=3, unit=nn.Linear, comm=comm)
    for m in (twin, engine.model):
        m[1][0].weight.requires_grad_(False)
        muon, adamw = muon_and_adamw(m)
        for seed in range(3):

            def closure(m: nn.Module = m, seed: int = seed) -> Tensor:
                m.zero_grad()
                loss(m, seed).backward()
                loss(m, seed + 1).backward()
                ringdp.clip_grad_norm_(engine, 1e9)
                return loss(m, seed)

            muon.step(closure)
            adamw.step()
    assert equal(whole_parameters(engine), twin.parameters())
    engine.close()


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, Centred])
@on_ranks(3)
def test_zero_redundancy_optimizer_gives_the_bits_of_the_whole_one(
    comm: Communicator, kind: Any
) -> None:
    made, twin = (net() for _ in range(2))
    optimizer = ringdp.ZeroRedundancyOptimizer(
        [p for p in made.parameters() if p.dim() == 2], kind, comm, lr=0.1
    )
    exact = kind([p for p in twin.parameters() if p.dim() == 2], lr=0.1)
    for seeds in ((0, 1), (2,)):
        step(made, optimizer, *seeds)
        step(twin, exact, *seeds)
        assert equal(made.parameters(), twin.parameters())
        optimizer.consolidate_state_dict()
        state = copy.deepcopy(optimizer._consolidated)
        if comm.rank == 0:
            torch.testing.assert_close(state, exact.state_dict()["state"], rtol=0, atol=0)
        for o in (optimizer, exact):
            o.load_state_dict(copy.deepcopy(exact.state_dict()))
    optimizer.optim.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert equal(made.parameters(), twin.parameters())
