"""torch's functions of state_dicts, and FSDP's, give what they give with torch's FSDP2."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ringdp import Communicator, UsageError
from ringdp.parallel import fronts
from tests.parallel.ddp.cases import gloo
from tests.parallel.optimizer.test_state import assert_same
from tests.parallel.small import assert_equal, groups, net, step
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

NAMES = [*(f"{i}.0.bias" for i in range(3)), *(f"{i}.0.weight" for i in range(3))]


def by_blocks(model: Any, shards: Any) -> Any:
    for block in (model[1], model[2], model):
        shards(block)
    return model


def by_hand(model: Any, wraps: Any) -> Any:
    model[1] = wraps(model[1])
    return wraps(model)


def save_and_load_states(comm: Communicator, shards: Any) -> tuple[Any, ...]:
    """An FSDP script: the states of one run are loaded into another, on all ranks or from rank
    0."""

    def make(seed: int) -> tuple[Any, Any]:
        model = shards(net(seed))
        return model, torch.optim.AdamW(groups(model))

    model, optimizer = make(0)
    step(model, optimizer, 0, 1)
    full = StateDictOptions(full_state_dict=True)
    states = (
        get_model_state_dict(model, options=full),
        get_optimizer_state_dict(model, optimizer, options=full),
    )
    for options in (full, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
        later, fresh = make(1)
        to_set = copy.deepcopy(states) if comm.rank == 0 or options is full else ({}, {})
        set_model_state_dict(later, to_set[0], options=options)
        set_optimizer_state_dict(later, fresh, to_set[1], options=options)
        step(later, fresh, 2)
    last, third = make(2)
    some = copy.deepcopy(get_state_dict(later, fresh))
    set_state_dict(last, third, model_state_dict=some[0], optim_state_dict=some[1])
    step(last, third, 3)
    step(later, fresh, 3)
    found = [get_model_state_dict(m, options=full) for m in (later, last)]
    for m in (later, last):
        if hasattr(m, "engine"):
            m.engine.close()
    return states, found


@on_ranks(2)
def test_torchs_state_dict_functions_work_as_with_fsdp2(comm: Communicator) -> None:
    """Also of FullyShardedDataParallel; torch's own needs a GPU."""
    gloo()
    theirs = save_and_load_states(comm, lambda model: by_blocks(model, torchs.fully_shard))
    wraps = partial(fronts.FullyShardedDataParallel, process_group=comm)
    for shards in (
        lambda model: by_blocks(model, partial(fronts.fully_shard, comm=comm)),
        partial(wraps, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
        lambda model: by_hand(model, wraps),
    ):
        ours = save_and_load_states(comm, shards)
        torch.testing.assert_close(dict(ours[0][0]), dict(theirs[0][0]))
        assert_same(ours[0][1], theirs[0][1])
        for found in (*ours[1], theirs[1][1]):
            torch.testing.assert_close(dict(found), dict(theirs[1][0]))


@pytest.mark.parametrize("wrapped", [True, False])
@on_ranks(2)
def test_fsdps_optim_state_dict_has_parameter_names(comm: Communicator, wrapped: bool) -> None:
    """torch's own needs a GPU, but its format is known."""
    front = fronts.FullyShardedDataParallel
    wrap = ModuleWrapPolicy({nn.Sequential}) if wrapped else None

    def make() -> tuple[Any, Any]:
        model = net()
        wraps = partial(front, process_group=comm)
        model = wraps(model, auto_wrap_policy=wrap) if wrap else by_hand(model, wraps)
        return model, torch.optim.AdamW(groups(model))

    twin, (model, optimizer) = net(), make()
    exact = torch.optim.AdamW(groups(twin))
    for m, o in ((twin, exact), (model, optimizer)):
        step(m, o, 0, 1)
    whole = front.optim_state_dict(model, optimizer)
    numbers = {name: number for number, name in enumerate(NAMES)}
    plain = exact.state_dict()
    assert sorted(whole["state"]) == sorted(NAMES)
    torch.testing.assert_close({numbers[n]: s for n, s in whole["state"].items()}, plain["state"])
    assert [n for g in whole["param_groups"] for n in g["params"]] == NAMES
    alone = front.optim_state_dict(model, optimizer, {"state": optimizer.state_dict()["state"]})
    assert [*alone] == ["state"]
    one = FullOptimStateDictConfig(rank0_only=True)
    with front.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, one):
        again = front.optim_state_dict(model, optimizer, optimizer.state_dict())
    assert list(again) == (["state", "param_groups"] if comm.rank == 0 else [])
    with pytest.raises(UsageError, match=r"no param_groups, .*allowed: rank 0's, on every rank"):
        front.optim_state_dict_to_load(model, optimizer, {})
    later, fresh = make()
    later.load_state_dict(model.state_dict())
    fresh.load_state_dict(front.optim_state_dict_to_load(later, fresh, copy.deepcopy(whole)))
    for m, o in ((twin, exact), (later, fresh)):
        step(m, o, 2)
    assert_equal(later.engine, twin)
    front.optim_state_dict_to_load(later, fresh, whole, load_directly=True)
    torch.testing.assert_close(front.optim_state_dict(later, fresh)["state"], whole["state"])
    for m in (model, later):
        m.engine.close()


@on_ranks(2)
def test_fsdps_optim_state_dict_is_loaded_by_name(comm: Communicator) -> None:
    """Also where a group has its parameters in another order, and before the first step of an
    optimizer that has state from the start."""
    front = fronts.FullyShardedDataParallel
    model = front(net(), comm)
    named = dict(model.named_parameters())
    optimizer = torch.optim.Adagrad(model.named_parameters())
    for steps in range(2):
        state = front.optim_state_dict(model, optimizer)
        for whole, name in zip(net().parameters(), named, strict=True):
            assert state["state"][name]["sum"].shape == whole.shape
        turned = torch.optim.Adagrad([*model.named_parameters()][::-1])
        front.optim_state_dict_to_load(model, turned, state, load_directly=True)
        again = front.optim_state_dict(model, turned)
        torch.testing.assert_close(again["state"], state["state"])
        for (group,) in (state["param_groups"], again["param_groups"]):
            assert group["param_names"] == group["params"]
        step(model, optimizer, steps)
    state["state"]["other"] = state["state"].pop("0.0.bias")
    with pytest.raises(UsageError, match="only one of them has other; allowed: groups"):
        front.optim_state_dict_to_load(model, optimizer, state)
    foreign = torch.optim.SGD(net().parameters())
    for act in (front.optim_state_dict, front.optim_state_dict_to_load):
        with pytest.raises(UsageError, match="SGD steps a parameter that the wrapped model"):
            act(model, foreign, state)
    model.engine.close()
