"""The state_dict of an optimizer of slices has whole parameters: it equals one process's."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import ringdp
from ringdp import Communicator, Offload, UsageError
from ringdp.parallel import fronts
from tests.parallel.small import COMPUTE_IN_FLOAT64, assert_equal, groups, loss, net, step
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "apart": {"precision": COMPUTE_IN_FLOAT64},
    "offload": {"offload": Offload(optimizer=True)},
}


class Lookahead(torch.optim.Optimizer):
    """A wrapper like timm's: without Optimizer.__init__, and with the other's state_dict."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.base, self.param_groups, self.state = base, base.param_groups, defaultdict(dict)
        self.defaults = base.defaults

    @torch.no_grad()
    def step(self) -> None:
        self.base.step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                slow = self.base.state[p].setdefault("slow", torch.zeros_like(p))
                p.copy_(slow.add_(p - slow, alpha=0.5))

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()


@on_ranks(2)
def test_an_optimizer_in_a_wrapper_without_hooks(comm: Communicator) -> None:
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    optimizer, plain = (Lookahead(torch.optim.Adam(m.parameters())) for m in (model, twin))
    for m, o in ((model, optimizer), (twin, plain)):
        step(m, o, 0, 1)
    assert_equal(engine, twin)
    with pytest.raises(UsageError, match="state_dict of a sharded model's optimizer"):
        optimizer.state_dict()
    with engine.full_parameters():
        assert_same(optimizer.state_dict(), plain.state_dict())
    engine.close()


def assert_same(state: Any, expected: Any) -> None:
    assert list(state["state"]) == list(expected["state"])
    torch.testing.assert_close(state["state"], expected["state"])
    assert state["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [torch.optim.NAdam, ringdp.AdamW])
@on_ranks(3)
def test_the_state_dict_equals_that_of_one_process(
    comm: Communicator, kind: Any, options: dict[str, Any]
) -> None:
    twin = net()
    exact = kind(groups(twin))
    step(twin, exact, 0, 1)
    for stage in (1, 2, 3):
        model = net()
        engine = ringdp.shard(model, stage=stage, unit=nn.Linear, comm=comm, **options)
        optimizer = kind(groups(model))
        step(model, optimizer, 0, 1)
        with engine.full_parameters():
            state = optimizer.state_dict()
        assert_same(state, exact.state_dict())
        with pytest.raises(UsageError, match="call it within full_parameters"):
            optimizer.state_dict()

        later = net()
        later.load_state_dict(twin.state_dict())
        ahead = ringdp.shard(later, stage=4 - stage, comm=comm, **options)
        fresh = kind(groups(later))
        fresh.load_state_dict(copy.deepcopy(state))  # before its first step
        step(later, fresh, 2)
        step(model, optimizer, 2)
        optimizer.load_state_dict(state)  # after some steps
        with engine.full_parameters():
            assert_same(optimizer.state_dict(), exact.state_dict())
        trained = copy.deepcopy(twin)
        last = kind(groups(trained))
        last.load_state_dict(copy.deepcopy(exact.state_dict()))
        step(trained, last, 2)
        assert_equal(ahead, trained)
        for e in (engine, ahead):
            e.close()
        with pytest.raises(UsageError, match="state_dict of a sharded model's optimizer"):
            optimizer.state_dict()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
@on_ranks(2)
def test_an_optimizer_of_slices_is_not_copied(comm: Communicator, copied: Any) -> None:
    """Its copy would not know that its state is of slices: its state_dict would be no error."""
    model = net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    optimizer = torch.optim.Adam(model.parameters())
    zero = fronts.ZeroRedundancyOptimizer(net().parameters(), torch.optim.Adam, comm)
    step(model, optimizer, 0)
    with engine.full_parameters():
        for x in (optimizer, zero):
            with pytest.raises(UsageError, match=r"copied or pickled .* Load its state_dict"):
                copied(x)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3)
def test_closures_leave_no_state_of_empty_slices(comm: Communicator, stage: int) -> None:
    """A closure computes gradients during the step, also of empty slices; state of those would
    count other steps than the rank with the elements."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    for kind in (torch.optim.Adam, torch.optim.Adagrad):
        states = []
        for m in (model, twin):
            optimizer = kind(m.parameters())
            step(m, optimizer, 0)

            def closure(m: nn.Module = m, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                value = loss(m, 1)
                value.backward()
                return value

            optimizer.step(closure)
            assert all(p.numel() for p in optimizer.state)
            with engine.full_parameters():
                states.append(optimizer.state_dict())
        assert_same(*states)
        assert_equal(engine, twin)
    engine.close()


@on_ranks(2)
def test_the_state_dict_is_gathered_by_the_models_current_engine(comm: Communicator) -> None:
    """Closed with full parameters and sharded again, with the same optimizer."""
    model, twin = net(), net()
    exact = torch.optim.Adam(twin.parameters())
    step(twin, exact, 0, 1)
    engine = ringdp.shard(model, stage=2, comm=comm)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    with engine.full_parameters():
        engine.close()
    engine = ringdp.shard(model, stage=3, comm=comm)
    step(model, optimizer, 1)
    with engine.full_parameters():
        assert_same(optimizer.state_dict(), exact.state_dict())
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Muon])
@on_ranks(2)
def test_state_of_slices_does_not_step_slices_that_are_cut_elsewhere(
    comm: Communicator, kind: Any, stage: int, tmp_path: Path
) -> None:
    """A checkpoint is another matter: it has state of the whole."""
    model, twin = net(), net()
    optimizer, exact = (kind([p for p in m.parameters() if p.dim() == 2]) for m in (model, twin))
    engine = ringdp.shard(model, stage=3, comm=comm)
    step(model, optimizer, 0)
    step(twin, exact, 0, 1)
    ringdp.save(tmp_path, engine, optimizer)
    with engine.full_parameters():
        engine.close()
    engine = ringdp.shard(model, stage=stage, unit=1_000_000, comm=comm)
    with pytest.raises(UsageError, match=r"state of .*slices .*load the state_dict"):
        step(model, optimizer, 1)
    ringdp.load(tmp_path, engine, optimizer)
    step(model, optimizer, 1)
    assert_equal(engine, twin)
    engine.close()


@pytest.mark.parametrize("loads", [True, False])
@on_ranks(2)
def test_state_of_slices_does_not_step_a_model_left_whole(comm: Communicator, loads: bool) -> None:
    """It may load its whole state, and is then an ordinary optimizer."""
    model, twin = net(), net()
    exact = torch.optim.Adam(twin.parameters())
    engine = ringdp.shard(model, stage=2, comm=comm)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    step(twin, exact, 0)
    with engine.full_parameters():
        state = optimizer.state_dict()
        engine.close()
    if loads:
        optimizer.load_state_dict(state)
        step(model, optimizer, 1)
        step(twin, exact, 1)
        assert_same(optimizer.state_dict(), exact.state_dict())
        torch.testing.assert_close([*model.parameters()], [*twin.parameters()])
    else:
        with pytest.raises(UsageError, match=r"steps a model that close\(\) has left whole"):
            step(model, optimizer, 1)
        with pytest.raises(UsageError, match="flat slices"):
            optimizer.state_dict()


class Hollow(nn.Module):
    """Parameters without elements, among others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(0))
        self.linear = nn.Linear(6, 6)
        with warnings.catch_warnings(action="ignore"):  # that there is nothing to initialize
            self.none = nn.Linear(0, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) + self.none(x[:, :0]) + self.first.sum()
        return out


@pytest.mark.parametrize("kind", [torch.optim.AdamW, ringdp.AdamW])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_parameters_without_elements_have_state(
    comm: Communicator, tmp_path: Path, stage: int, kind: Any
) -> None:
    torch.manual_seed(0)
    twin = Hollow()
    models = [copy.deepcopy(twin) for _ in range(2)]
    exact = torch.optim.AdamW(twin.parameters())
    engine, other = (ringdp.shard(m, stage=stage, comm=comm) for m in models)
    optimizer, fresh = (kind(m.parameters()) for m in models)
    for m, o in ((twin, exact), (models[0], optimizer)):
        step(m, o, 0, 1)
    assert engine.memory(optimizer) == engine.memory_formula()
    ringdp.save(tmp_path, engine, optimizer)
    ringdp.load(tmp_path, other, fresh)
    for e, o in ((engine, optimizer), (other, fresh)):
        with e.full_parameters(write=True):
            torch.testing.assert_close(o.state_dict()["state"], exact.state_dict()["state"])
            saved = get_state_dict(e.model, o)
            set_state_dict(e.model, o, model_state_dict=saved[0], optim_state_dict=saved[1])
            torch.testing.assert_close(o.state_dict()["state"], exact.state_dict()["state"])
        e.close()


@on_ranks(1)
def test_torchs_functions_of_an_optimizer_without_state_name_its_own(comm: Communicator) -> None:
    """Torch's make the state by a step."""
    model, twin = net(), net()
    exact = torch.optim.Adam(twin.parameters())
    step(twin, exact, 0)
    engine = ringdp.shard(model, stage=3, comm=comm)
    optimizer = torch.optim.Adam(model.parameters())
    with engine.full_parameters(write=True):
        saved = get_optimizer_state_dict(twin, exact)
        with pytest.raises(UsageError, match=r"optimizer's own state_dict\(\) or load_state_dict"):
            set_optimizer_state_dict(model, optimizer, saved)
    engine.close()


@on_ranks(2)
def test_state_of_unsharded_parameters_is_left_unchanged(comm: Communicator) -> None:
    model, other = net(), nn.Parameter(torch.ones(2))
    engine = ringdp.shard(model, stage=3, comm=comm)
    optimizer = torch.optim.Adam([other, *model.parameters()])
    loss(model).backward()
    other.grad = torch.ones(2)
    optimizer.step()
    with engine.full_parameters():
        state = optimizer.state_dict()
    shapes = [s["exp_avg"].shape for s in state["state"].values()]
    assert shapes == [(2,), *3 * [(6, 6), (6,)]]
    optimizer.load_state_dict(state)
    assert optimizer.state[other]["exp_avg"] is state["state"][0]["exp_avg"]
    for p in model.parameters():
        optimizer.state[p]["odd"] = torch.ones(2, 2)
    odd = r"'odd' of parameter 0\.0\.weight has shape \[2, 2\]"
    with engine.full_parameters(), pytest.raises(UsageError, match=odd):
        optimizer.state_dict()
    state["state"][1]["odd"] = torch.ones(2, 2)
    with pytest.raises(UsageError, match=odd):
        optimizer.load_state_dict(state)
    engine.close()
