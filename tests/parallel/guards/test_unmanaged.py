"""Parameters added to a model after it was sharded belong to no unit: an error names them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Engine, Precision, UsageError
from tests.parallel.small import COMPUTE_IN_FLOAT64, WIDTH, loss, net, with_and_without_precision
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def assign(engine: Engine) -> None:
    state = {name: t.clone() for name, t in net().state_dict().items()}
    with engine.full_parameters(write=True):
        engine.model.load_state_dict(state, assign=True)


def put_layer(engine: Engine) -> None:
    engine.model.add_module("2", nn.Linear(WIDTH, WIDTH))


def put_frozen(engine: Engine) -> None:
    engine.model.get_submodule("1.0").bias = nn.Parameter(torch.ones(WIDTH), requires_grad=False)


def add(engine: Engine) -> None:
    engine.model.get_submodule("0.0").scale = nn.Parameter(torch.ones(1))


def tie(engine: Engine) -> None:
    first, last = (engine.model.get_submodule(name) for name in ("0.0", "2.0"))
    last.weight = first.weight


CHANGES: dict[str, Callable[[Engine], None]] = {
    "parameter 0.0.weight is another": assign,
    "parameter 2.weight is another": put_layer,
    "parameter 1.0.bias is another": put_frozen,
    "parameter 0.0.scale is another": add,
    "parameter 2.0.weight is another than": tie,
}


@with_and_without_precision
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_parameters_without_a_unit_are_refused(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    for late in (False, True):
        for words, change in CHANGES.items():
            engine = ringdp.shard(model := net(), stage=stage, precision=precision, comm=comm)
            if late:
                loss(model).backward()
            if change is assign:
                with pytest.raises(UsageError, match=words):
                    change(engine)
            else:
                change(engine)
            with pytest.raises(UsageError, match=words):
                loss(model)
            engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_parameters_without_a_unit_are_refused_in_a_block(comm: Communicator, stage: int) -> None:
    """The blocks are called directly, not through the model, in the first iteration."""
    engine = ringdp.shard(model := net(), stage=stage, comm=comm)
    put_layer(engine)
    with pytest.raises(UsageError, match=r"parameter 2\.weight"):
        model[0](torch.ones(1, WIDTH))
    engine.close()


@with_and_without_precision
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_harmless_changes_of_the_model_train_as_in_one_process(
    comm: Communicator, stage: int, precision: Precision | None
) -> None:
    """Forwards without a backward, a frozen parameter added, a layer frozen or removed."""
    model, twin = net(), net()
    engine = ringdp.shard(model, stage=stage, precision=precision, comm=comm)
    for change in (
        lambda one: one[2].register_parameter("extra", nn.Parameter(torch.ones(1), False)),
        lambda one: one[0].requires_grad_(False),
        lambda one: one.__delitem__(1),
        lambda one: one.zero_grad(),
    ):
        for one in (model, twin):
            change(one)
            loss(one)
            loss(one).backward()
            torch.optim.SGD(one.parameters(), lr=0.1).step()
    with engine.full_parameters():
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
    engine.close()


@on_ranks(2)
def test_functional_call_works_in_stage_0(comm: Communicator) -> None:
    """Calls with other tensors, whose gradients are not reduced; and evaluation with other
    parameters."""
    engine = ringdp.shard(model := net(), stage=0, comm=comm)
    others = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(model, dict(net().named_parameters()), torch.ones(1, WIDTH))
    out: Tensor = torch.func.functional_call(model, others, (torch.ones(1, WIDTH),))
    engine.close()
    assert out.requires_grad


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_functional_call_is_refused_where_it_would_be_ignored(
    comm: Communicator, stage: int
) -> None:
    """Otherwise the module would silently use its own parameters."""
    engine = ringdp.shard(model := net(), stage=stage, precision=COMPUTE_IN_FLOAT64, comm=comm)
    zeros = {name: torch.zeros_like(p) for name, p in net().named_parameters()}
    x = torch.ones(1, WIDTH)
    with pytest.raises(UsageError, match=r"0\.0\.weight is another .* within full_parameters"):
        torch.func.functional_call(model, zeros, (x,))
    with torch.no_grad(), engine.full_parameters():
        assert not torch.func.functional_call(model, zeros, (x,)).any()
    loss(model).backward()
    engine.close()
