"""What cannot be done to a sharded model, or with its optimizer: an error says it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ringdp
from ringdp import Communicator, UsageError
from tests.parallel.small import APART, assert_equal, batch, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class Adafactor(torch.optim.SGD):
    """Another library's, as far as its name tells."""


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_what_cannot_be_done_is_told(comm: Communicator, stage: int) -> None:
    def refused(act: Callable[[], object], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            act()

    model = net()
    around = nn.Sequential(model, nn.Linear(1, 1))
    engine = ringdp.shard(model, stage=stage, comm=comm)
    refused(lambda: ringdp.shard(model[1], stage=stage, comm=comm), "this model is sharded already")
    refused(
        lambda: ringdp.shard(around, stage=stage, comm=comm),
        "module 0 of this model is sharded already",
    )
    refused(
        lambda: ringdp.DistributedDataParallel(model, process_group=comm),
        "this model is sharded already",
    )
    for kind in (torch.optim.LBFGS, Adafactor) if stage else ():
        optimizer = kind(model.parameters())
        step = partial(optimizer.step, lambda: loss(model))
        refused(step, f"{kind.__name__} needs whole parameters")
    model.double()
    if not stage:
        with torch.no_grad():
            model(batch(0).double())
    refused(
        lambda: model(batch(0).double()),
        r"has become torch\.float64.* in the sharded model it is torch\.float32",
    )
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_an_optimizer_of_passing_parameters_is_told(comm: Communicator, stage: int) -> None:
    """Where others compute in their place, it trained nothing, without a word."""
    model = net()
    engine = ringdp.shard(model, stage=stage, unit=1 << 40, precision=APART, comm=comm)  # one unit
    value = loss(model)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    value.backward()
    with pytest.raises(UsageError, match="made between a forward and the end of its backward"):
        late.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    twin = net()
    loss(twin).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_equal(engine, twin)
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_a_loss_of_parameters_at_rest_is_told(comm: Communicator, stage: int) -> None:
    """Where others compute in their place, their gradients were lost without a word."""
    model = net()
    parameters = list(model.parameters())
    engine = ringdp.shard(model, stage=stage, precision=APART, comm=comm)
    value = loss(model)
    with pytest.raises(UsageError, match=r"\.0\.(weight|bias)"):
        (value + sum(p.square().sum() for p in parameters)).backward()
    model.zero_grad()
    loss(model).backward()
    engine.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda model: ringdp.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: ringdp.LossScaler(model),
        lambda model: ringdp.save("checkpoint", model),
        lambda model: ringdp.load("checkpoint", model),
        lambda model: ringdp.export("model.safetensors", model),
    ],
    ids=["clip_grad_norm_", "LossScaler", "save", "load", "export"],
)
def test_a_model_is_no_engine(call):
    with pytest.raises(UsageError, match=r"allowed: what ringdp\.shard returns"):
        call(nn.Linear(2, 2))


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_ranks_with_different_models_are_told(comm: Communicator, stage: int) -> None:
    """They trained one that no rank had, without a word."""
    wide = nn.Linear(8, 8 + comm.rank)  # padded, both are of one size
    named = nn.ParameterDict([(name, torch.ones(3)) for name in ("ab", "ba")[comm.rank]])
    alike = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    models: list[tuple[nn.Module, Any, str]] = [
        (wide, None, r"'weight' with sizes \[9, 8\] on rank 1"),
        (named, None, "'b' with name b on rank 1"),
        (alike, lambda m: m is alike[comm.rank], "'0.weight' with unit root on rank 1"),
    ]
    for model, unit, what in models:
        told = f"(?s)shard expects same model across all ranks.*{what}"
        with pytest.raises(ringdp.ModelError, match=told):
            ringdp.shard(model, stage=stage, unit=unit, comm=comm)


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_gradients_and_states_of_before(comm: Communicator, stage: int) -> None:
    """The first of them ended the backward in a RuntimeError of shapes, from stage 1 on; the state
    goes on, in slices."""
    model, twin = net(), net()
    early = torch.optim.Adam(model.parameters())
    loss(model).backward()
    early.step()
    twin.load_state_dict(model.state_dict())
    engine = ringdp.shard(model, stage=stage, comm=comm)
    late = torch.optim.Adam(twin.parameters())
    late.load_state_dict(deepcopy(early.state_dict()))
    for m, optimizer in ((model, early), (twin, late)):
        loss(m).backward()
        optimizer.step()
    assert_equal(engine, twin)
    engine.close()


class Keeps(nn.Module):
    """Its second layer's weight is the first's, where no module has registered it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.kept = [self.first.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.first(x), self.kept[0])


@pytest.mark.parametrize("stage", range(4))
@on_ranks(1)
def test_a_weight_that_a_module_keeps_in_a_list_is_told(comm: Communicator, stage: int) -> None:
    engine = ringdp.shard(model := Keeps(), stage=stage, precision=APART, comm=comm)
    why = "as it is at rest, where it computes in another dtype" if stage == 0 else "outside"
    for graph in (True, False):
        with torch.set_grad_enabled(graph), pytest.raises(UsageError, match=why) as error:
            model(batch(0))
        assert str(error.value).startswith("first.weight is used")
    engine.close()


class Reads(nn.Module):
    """Uses the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.read = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.first(x), self.read.weight)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(1)
def test_a_weight_of_a_unit_that_is_never_called_is_told(comm: Communicator, stage: int) -> None:
    engine = ringdp.shard(model := Reads(), stage=stage, unit=nn.Linear, precision=APART, comm=comm)
    for graph in (True, False):
        with (
            torch.set_grad_enabled(graph),
            pytest.raises(UsageError, match=r"read.weight .* let both lie in one unit"),
        ):
            model(batch(0))
    engine.close()
