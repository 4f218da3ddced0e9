"""The state_dict of a model in stage 0 with separate masters (refusals: test_misuse), and where an
optimizer's is refused (otherwise: test_state)."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Engine, Precision, UsageError
from tests.equal import equal
from tests.parallel.small import COMPUTE_IN_FLOAT64, assert_equal, loss, net, step, whole_parameters
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(2)
def test_in_stage_0_the_state_dict_has_the_masters(comm: Communicator) -> None:
    """Also with a forward left open, when modules hold parameters of lower precision."""

    def make(seed: int = 0) -> tuple[nn.Sequential, Engine]:
        model = net(seed)
        options: Any = {"unit": nn.Linear, "precision": Precision(torch.bfloat16)}
        return model, ringdp.shard(model, stage=0, comm=comm, **options)

    def gradients(model: nn.Module) -> list[Tensor]:
        loss(model).backward()
        return [p.grad for p in model.parameters()]

    model, engine = make()
    twin, others = make()
    states = []
    value = loss(model)
    states += [model.state_dict(), model[0].state_dict(prefix="0."), model.state_dict()]
    value.backward()
    exact = gradients(twin)
    torch.testing.assert_close([p.grad for p in model.parameters()], exact, rtol=0, atol=0)
    for register in (model[1].register_forward_hook, model[1].register_full_backward_hook):
        handle = register(lambda *_: states.append(model.state_dict()))
        model.zero_grad()
        torch.testing.assert_close(gradients(model), exact, rtol=0, atol=0)
        handle.remove()
    assert len(states) == 5
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(value, net().get_parameter(name).detach(), rtol=0, atol=0)

    value = loss(model)
    model[1].load_state_dict(net(1)[1].state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    loss(model)
    model.load_state_dict(net(1).state_dict())
    assert_equal(engine, net(1))
    other, third = make(1)
    assert loss(model) == loss(other)
    with pytest.raises(UsageError, match=r"as after load_state_dict\(assign=True\)"):
        model.load_state_dict(net(2).state_dict(), assign=True)
    for e in (engine, others, third):
        e.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_an_optimizers_state_dict_of_slices_is_refused(
    comm: Communicator, tmp_path: Path, stage: int
) -> None:
    """Saving and loading of the optimizer work, and in stage 0 its copies."""

    model, other = net(), net(1)
    engine, second = (ringdp.shard(m, stage=stage, comm=comm) for m in (model, other))
    optimizer, fresh = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(model, optimizer, 0, 1)
    schedule.load_state_dict(schedule.state_dict())
    if stage == 0:
        fresh.load_state_dict(optimizer.state_dict())
        for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert repr(twin.state_dict()) == repr(optimizer.state_dict())
    else:
        with pytest.raises(UsageError, match=r"flat slices\. Use ringdp\.save and ringdp\.load"):
            optimizer.state_dict()
    ringdp.save(tmp_path, engine, optimizer)
    ringdp.load(tmp_path, second, fresh)
    with engine.full_parameters(), second.full_parameters():  # before its first step
        states = [o.state_dict()["state"] for o in (fresh, optimizer)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for m, o in ((model, optimizer), (other, fresh)):
        step(m, o, 0)
    assert equal(whole_parameters(engine), whole_parameters(second))
    for e in (engine, second):
        e.close()


@pytest.mark.parametrize("options", [{}, {"precision": COMPUTE_IN_FLOAT64}], ids=["plain", "apart"])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_state_dict_keeps_its_values(
    comm: Communicator, stage: int, options: dict[str, Any]
) -> None:
    model = net()
    engine = ringdp.shard(model, stage=stage, unit=nn.Linear, comm=comm, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with engine.full_parameters():
        state = model.state_dict()
    loss(model).backward()
    optimizer.step()
    loss(model)
    assert all(torch.equal(value, net().get_parameter(name)) for name, value in state.items())
    assert not torch.equal(whole_parameters(engine)[0], state["0.0.weight"])
    engine.close()


@pytest.mark.parametrize("options", [{}, {"precision": COMPUTE_IN_FLOAT64}], ids=["plain", "apart"])
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_tensors_of_a_state_dict_have_storages_of_their_own(
    comm: Communicator, stage: int, options: dict[str, Any]
) -> None:
    """Libraries leave all but one tensor of a storage out of a file. Writes to them are kept."""
    model = nn.ModuleList([net(), nn.ParameterList()])
    model[1].append(model[0][0][0].weight)
    engine = ringdp.shard(model, stage=stage, unit=nn.Linear, comm=comm, **options)
    with engine.full_parameters(write=True):
        state = model.state_dict()
        for name, p in model.named_parameters(remove_duplicate=False):
            assert state[name].data_ptr() == p.data_ptr()
            assert state[name].untyped_storage().nbytes() == p.nbytes
            state[name].fill_(2)
        tied = state["0.0.0.weight"], state["1.0"]
        assert len({t.untyped_storage()._cdata for t in tied}) == 1
        whole = model.state_dict(keep_vars=True)
        assert all(whole[name] is p for name, p in model.named_parameters())
    assert all(torch.equal(p, torch.full_like(p, 2)) for p in whole_parameters(engine))
    engine.close()
