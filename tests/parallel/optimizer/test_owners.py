"""State of whole parameters: it stays with their owners, in any form, and is saved and loaded."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map_only

import ringdp
from ringdp import CheckpointError, Communicator, UsageError
from ringdp.parallel import nested
from ringdp.parallel.layout import layout
from ringdp.parallel.optimizer import whole
from ringdp.parallel.optimizer.owners import places
from tests.equal import equal
from tests.parallel.small import WIDTH, net, step, whole_parameters
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class Preconditioned(torch.optim.Optimizer):
    """As SOAP and Kron it keeps matrices in lists; and one value per element in a dict. It gives
    parameters other memory."""

    needs_whole_parameters = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["sides"] = [torch.eye(d) if d > 1 else None for d in p.shape]
                    state["of"] = (None, {"shape": (*p.shape,), 0.9: torch.zeros_like(p)})
                state["step"] += 1
                momentum = state["of"][1][0.9]
                momentum.mul_(0.9).add_(p.grad)
                out = momentum
                for at, side in enumerate(state["sides"]):
                    unfolded = p.grad.movedim(at, 0).flatten(1) if p.dim() > 1 else p.grad[:, None]
                    side.lerp_(unfolded @ unfolded.T, 0.5)
                    out = torch.tensordot(side, out, dims=([1], [at])).movedim(0, at)
                p.data = p.data.sub(out, alpha=group["lr"])


class ByElement(torch.optim.Optimizer):
    """As AggMo it keeps a dict of one value per element for each of its rates."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["momenta"] = {rate: torch.zeros_like(p) for rate in (0.5, 0.75)}
            for rate, momentum in state["momenta"].items():
                p.sub_(momentum.mul_(rate).add_(p.grad), alpha=self.param_groups[0]["lr"])


def assert_state(*states: Any) -> None:
    """Equal in bits and types."""
    found, exact = (tree_map_only(Tensor, Tensor.tolist, state) for state in states)
    assert repr(found) == repr(exact)


def saves(comm: Communicator, path: Path, stage: int, kind: Any) -> None:
    twin, engine = net(), ringdp.shard(net(), stage=stage, comm=comm)
    exact, optimizer = (kind(m.parameters()) for m in (twin, engine.model))
    step(twin, exact, 0, 1)
    step(engine.model, optimizer, 0, 1)
    assert equal(whole_parameters(engine), twin.parameters())
    with engine.full_parameters():
        state = copy.deepcopy(optimizer.state_dict())
    assert_state(state, exact.state_dict())
    optimizer.load_state_dict(state)
    ringdp.save(path, engine, optimizer)
    engine.close()


def loads(comm: Communicator, path: Path, stage: int, kind: Any) -> None:
    twin, engine = net(), ringdp.shard(net(1), stage=stage, comm=comm)
    exact, optimizer = (kind(m.parameters()) for m in (twin, engine.model))
    step(twin, exact, 0, 1, 2)
    ringdp.load(path, engine, optimizer)
    step(engine.model, optimizer, 2)
    assert equal(whole_parameters(engine), twin.parameters())
    with engine.full_parameters():
        assert_state(optimizer.state_dict(), exact.state_dict())
    engine.close()


@pytest.mark.parametrize("kind", [Preconditioned, ByElement])
@pytest.mark.parametrize(("wrote", "reads"), [((2, 3), (4, 1)), ((4, 2), (1, 0)), ((1, 0), (2, 2))])
def test_lists_and_dicts_of_tensors_are_state_like_any_other(
    ranks, tmp_path, wrote, reads, kind
) -> None:
    ranks(wrote[0])(saves, tmp_path, wrote[1], kind)
    ranks(reads[0])(loads, tmp_path, reads[1], kind)


@on_ranks(2)
def test_state_stays_where_it_is_when_parameters_are_added(comm: Communicator) -> None:
    """A large one, with which the others would be owned otherwise."""
    twin, engine = net(), ringdp.shard(net(), stage=3, comm=comm)
    steppers = []
    for m in (twin, engine.model):
        first, *others = m.parameters()
        steppers.append(Preconditioned(others[1:]))
        step(m, steppers[-1], 0, 1)
        steppers[-1].add_param_group({"params": [first, others[0]]})
        step(m, steppers[-1], 2)
    exact, optimizer = steppers
    assert len(optimizer.state) < len(exact.state)
    tensors = [t for t in tree_leaves([*optimizer.state.values()]) if isinstance(t, Tensor)]
    assert engine.memory(optimizer).optimizer == sum(t.nbytes for t in tensors) > 0
    assert equal(whole_parameters(engine), twin.parameters())
    with engine.full_parameters():
        assert_state(optimizer.state_dict(), exact.state_dict())
    engine.close()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([deque()], r"'odd' has a deque; allowed: tensors, numbers"),
        ({(1,): 2}, r"'odd' has a dict with a tuple for a key"),
    ],
)
@on_ranks(2)
def test_other_objects_are_named(comm: Communicator, tmp_path: Path, value: Any, said: str) -> None:
    """On all ranks, of which one has them."""
    engine = ringdp.shard(net(), stage=3, comm=comm)
    optimizer = Preconditioned(engine.model.parameters())
    step(engine.model, optimizer, 0)
    for state in optimizer.state.values():
        state["odd"] = value
    step(engine.model, optimizer, 1)
    with pytest.raises(CheckpointError, match=said):
        ringdp.save(tmp_path, engine, optimizer)
    with engine.full_parameters(), pytest.raises(UsageError, match=said):
        optimizer.state_dict()
    engine.close()


@pytest.mark.parametrize("packed", [{"tensor": "a[7]"}, {"dict": [[[], 1]]}, {"set": []}, 3])
def test_state_that_is_malformed(packed: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        nested.deep({"a": packed})
    with pytest.raises(TypeError, match=r"'a\[0\]' has a \[ in its name"):
        nested.flat({"a[0]": packed})


class Idle(torch.optim.Optimizer):
    """Takes no memory of its own."""

    needs_whole_parameters = True

    def step(self, closure: Any = None) -> None:
        pass


@on_ranks(1)
def test_a_single_rank_may_have_no_state(comm: Communicator) -> None:
    engine = ringdp.shard(net(), stage=3, comm=comm)
    optimizer = Idle(engine.model.parameters(), {})
    step(engine.model, optimizer, 0)
    assert not optimizer.state
    engine.close()


@on_ranks(2)
def test_a_model_is_sharded_again_in_other_units(comm: Communicator) -> None:
    """Its parameters lie on other ranks, and some have other owners."""
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, 2)))
    model = copy.deepcopy(twin)
    exact, optimizer = (Preconditioned(m.parameters()) for m in (twin, model))
    step(twin, exact, 0, 1)
    for seed, unit in enumerate((nn.Linear, nn.Sequential)):
        engine = ringdp.shard(model, stage=3, unit=unit, comm=comm)
        step(engine.model, optimizer, seed)
        with engine.full_parameters():
            state = copy.deepcopy(optimizer.state_dict())
            engine.close()
        optimizer.load_state_dict(state)
    assert equal(model.parameters(), twin.parameters())
    assert_state(optimizer.state_dict(), exact.state_dict())


def peak(act: Callable[[], object]) -> int:
    """Bytes that `act` held of torch's memory at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        act()
    most = held = 0
    events = found.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return most


@on_ranks(2)
def test_a_step_holds_what_a_rank_owns_and_one_piece(comm: Communicator, monkeypatch: Any) -> None:
    """Beside slices and state: of 16 matrices that lie on both ranks, one on its way at a time."""
    size = 256 * 256 * 4
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    engine = ringdp.shard(model, stage=3, unit=nn.Linear, comm=comm)
    optimizer = Idle(model.parameters(), {})
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    owned = 2 * 8 * size  # values and gradients
    assert owned + 8 * size <= peak(optimizer.step)  # all at once
    monkeypatch.setattr(whole, "PIECE", size)
    assert owned <= peak(optimizer.step) <= owned + 2 * size + 4096
    engine.close()


def units_of(sizes: Any, ranks: int) -> list[Any]:
    return [
        SimpleNamespace(plan=plan, parameters=ps, cut=SimpleNamespace(shapes=[p.shape for p in ps]))
        for plan in layout(sizes, ranks)
        for ps in [[nn.Parameter(torch.empty(e.elements)) for e in plan.entries]]
    ]


def test_owners_step_about_as_many_elements() -> None:
    """Of 12 layers whose matrices lie on one to three of eight ranks."""
    sizes = [
        (f"{i}", [("qkv", 3 * 4096), ("out", 4096), ("up", 16384), ("down", 16384)])
        for i in range(12)
    ]
    units = units_of(sizes, 8)
    optimizer = Preconditioned(p for unit in units for p in unit.parameters)
    load = Counter[int]()
    for place in places(optimizer, units, 0):
        assert place.owner in place.parts
        load[place.owner] += place.shape.numel()
    assert max(load.values()) <= 1.25 * sum(load.values()) / 8


def test_an_added_parameter_goes_to_the_rank_that_steps_less() -> None:
    units = units_of([("first", [("a", 4096)]), ("second", [("b", 4096)])], 2)
    optimizer = Preconditioned(units[0].parameters)
    (first,) = places(optimizer, units, 0)
    optimizer.add_param_group({"params": units[1].parameters})
    again, added = places(optimizer, units, 0)
    assert (again.owner, added.owner) == (first.owner, 1 - first.owner)
