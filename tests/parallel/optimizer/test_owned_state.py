"""Owners alone have state of whole parameters, and no rank has any that was made of a slice."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ringdp
from ringdp import CheckpointError, Communicator, UsageError
from ringdp.parallel.fronts import fully_shard
from tests.equal import equal
from tests.parallel.ddp.cases import gloo
from tests.parallel.optimizer.test_owners import Preconditioned, assert_state
from tests.parallel.small import loss, net, step, whole_parameters
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class Cautious(torch.optim.Optimizer):
    """By element without `caution`, as timm's are."""

    def __init__(self, params: Any, *, caution: bool) -> None:
        super().__init__(params, {"caution": caution})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.add_(p.grad)
                same = (momentum * p.grad > 0).to(p.dtype)
                scale = same / same.mean() if group["caution"] else 1
                p.sub_(momentum * scale, alpha=0.1)


@pytest.mark.parametrize("first", [False, True])
@on_ranks(2)
def test_caution_changes_with_a_load_of_whole_state(
    comm: Communicator, tmp_path: Path, first: bool
) -> None:
    """Else the state of slices would be taken for whole, or the reverse: an error on all ranks."""
    twin, engine = net(), ringdp.shard(net(), stage=3, comm=comm)
    exact, optimizer = (Cautious(m.parameters(), caution=first) for m in (twin, engine.model))
    step(twin, exact, 0)
    step(engine.model, optimizer, 0)
    ringdp.save(tmp_path, engine, optimizer)
    with engine.full_parameters():
        state = copy.deepcopy(optimizer.state_dict())
    other = Cautious(engine.model.parameters(), caution=not first)
    with pytest.raises(CheckpointError, match=rf"caution = {first} .* here {not first}: set it"):
        ringdp.load(tmp_path, engine, other)
    for of in (exact, optimizer, state):
        groups = of["param_groups"] if isinstance(of, dict) else of.param_groups
        groups[0]["caution"] = not first
    now = ("slices", "whole parameters")[not first]
    for act in (optimizer.step, optimizer.state_dict):
        with (
            engine.full_parameters() if act == optimizer.state_dict else nullcontext(),
            pytest.raises(UsageError, match=rf"Cautious looks at {now} now, .* Change it back"),
        ):
            act()
    optimizer.load_state_dict(state)
    step(twin, exact, 1)
    step(engine.model, optimizer, 1)
    assert equal(whole_parameters(engine), twin.parameters())
    engine.close()


@on_ranks(2)
def test_state_that_a_wrapper_makes_of_slices_is_refused(comm: Communicator) -> None:
    """As timm's Lookahead does. It would be lost with the next step."""
    engine = ringdp.shard(net(), stage=3, comm=comm)
    optimizer = Preconditioned(engine.model.parameters())
    step(engine.model, optimizer, 0)
    for p in engine.model.parameters():
        optimizer.state[p]["slow"] = p.detach().clone()
    optimizer.zero_grad()
    loss(engine.model).backward()
    with pytest.raises(UsageError, match=r"made between its steps, .* on rank [01]\. What"):
        optimizer.step()
    engine.close()


class Eager(torch.optim.Optimizer):
    """Makes state of parameters without a gradient, too."""

    needs_whole_parameters, fails = True, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            if p.grad is not None and not self.fails:
                p.sub_(momentum.add_(p.grad), alpha=0.1)
        if self.fails:
            raise ZeroDivisionError


@on_ranks(2)
def test_a_step_makes_no_state_of_slices(comm: Communicator) -> None:
    """Of those without a gradient, because they are frozen or another rank has them, and if the
    step raises."""
    twin, engine = net(), ringdp.shard(net(), stage=3, comm=comm)
    exact, optimizer = (Eager(m.parameters(), {}) for m in (twin, engine.model))
    for fails in (True, False):
        optimizer.fails = fails
        for m in (twin, engine.model):
            m[0][0].weight.requires_grad_(False)
            m.zero_grad()
            loss(m).backward()
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            optimizer.step()
    exact.step()
    for m in (twin, engine.model):
        m[0][0].weight.requires_grad_(True)
    step(twin, exact, 1, 2)
    step(engine.model, optimizer, 1, 2)
    assert equal(whole_parameters(engine), twin.parameters())
    with engine.full_parameters():
        assert_state(optimizer.state_dict(), exact.state_dict())
    engine.close()


@on_ranks(2)
def test_torchs_functions_of_state_dicts_where_a_rank_owns_nothing(comm: Communicator) -> None:
    """They step an optimizer that has no state, which would be on that rank alone."""
    gloo()
    model: Any = fully_shard(net(), comm=comm)
    first, second = (torch.optim.Muon([model[1][0].weight]) for _ in range(2))
    step(model, first, 0)
    model.zero_grad()
    full = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, first, options=full)
    set_optimizer_state_dict(model, second, copy.deepcopy(state), options=full)
    again = get_optimizer_state_dict(model, second, options=full)
    torch.testing.assert_close(again["state"], state["state"], rtol=0, atol=0)
    model.engine.close()


@on_ranks(2)
def test_after_close_all_ranks_refuse_state_that_one_has(comm: Communicator) -> None:
    engine = ringdp.shard(net(), stage=3, comm=comm)
    optimizer = Preconditioned([engine.model[0][0].weight])
    step(engine.model, optimizer, 0)
    with engine.full_parameters():
        state = copy.deepcopy(optimizer.state_dict())
        engine.close()
    for act in (optimizer.step, optimizer.state_dict):
        with pytest.raises(UsageError, match="flat slices"):
            act()
    optimizer.load_state_dict(state)
    optimizer.step()
    assert_state(optimizer.state_dict(), state)
