"""full_tensor() of parameters, of gradients, and of the tensors in a state_dict."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ringdp import Communicator, UsageError
from ringdp.parallel import fronts
from ringdp.parallel.fronts.full_tensor import FullTensor
from tests.parallel.fronts.scripts import Scaled, ours_and_torchs
from tests.parallel.small import batch, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def full_tensors(shards: Any, frees: bool) -> list[dict[str, Tensor]]:
    """A script that writes out the full parameters and gradients."""
    model: Any = net()
    for block in (*model, model):
        shards(block, reshard_after_forward=frees)
    loss(model).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    written = [
        {name: value.full_tensor() for name, value in named}
        for named in (model.named_parameters(), model.state_dict().items())
    ]
    for make in (lambda g: g, torch.square):
        gradients = {n: make(p.grad).full_tensor() for n, p in model.named_parameters()}
        written.append(gradients)
    if hasattr(model, "engine"):
        model.set_requires_gradient_sync(False)
        loss(model).backward()
        with pytest.raises(UsageError, match=r"after set_requires_gradient_sync\(True\)"):
            model[0][0].weight.grad.full_tensor()
    return written


@pytest.mark.parametrize("frees", [True, False])
@on_ranks(3)
def test_full_tensor_works_as_with_torchs(comm: Communicator, frees: bool) -> None:
    found, torchs = ours_and_torchs(comm, partial(full_tensors, frees=frees))
    torch.testing.assert_close(found, torchs)
    assert {type(value) for values in found for value in values.values()} == {Tensor}


@on_ranks(2)
def test_state_dicts_become_ordinary_tensors(comm: Communicator, tmp_path: Path) -> None:
    """When it is copied, saved, or assigned to another model."""
    model: Any = net()
    fronts.fully_shard(model, comm=comm)
    state = model.state_dict(destination=None)
    torch.save(state, tmp_path / str(comm.rank))
    saved = torch.load(tmp_path / str(comm.rank), weights_only=True)
    for values in (copy.deepcopy(state), saved, {k: v.clone() for k, v in state.items()}):
        assert {type(value) for value in values.values()} == {Tensor}
        torch.testing.assert_close(dict(values), dict(net().state_dict()))
    with torch.device("meta"):
        twin = net()
    twin.load_state_dict(state, assign=True)
    assert {type(p) for p in twin.parameters()} == {nn.Parameter}
    loss(twin).backward()
    torch.testing.assert_close([*copy.deepcopy(twin).parameters()], [*net().parameters()])
    assert isinstance(state["0.0.weight"], FullTensor)
    with pytest.raises(UsageError, match=r"no DTensors: device_mesh .* whole tensors"):
        state["0.0.weight"].device_mesh  # noqa: B018
    assert model.state_dict(keep_vars=True)["0.0.weight"] is model[0][0].weight
    model.engine.close()


def full_tensors_before_backward(shards: Any, **options: Any) -> list[Tensor]:
    """Of all parameters after the forward, in which the root's stay gathered."""
    model: Any = Scaled()
    for block in (*model.blocks, model):
        shards(block, **options)
    value = model(batch()).square().mean()
    found = [p.full_tensor() for p in model.parameters()]
    value.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(
        p.full_tensor().ne(old).any() for p, old in zip(model.parameters(), found, strict=True)
    )
    if hasattr(model, "engine"):
        model.engine.close()
    return found


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16)])
@on_ranks(2)
def test_full_tensor_works_between_forward_and_backward(comm: Communicator, policy: Any) -> None:
    script = partial(full_tensors_before_backward, reshard_after_forward=True, mp_policy=policy)
    ours, torchs = ours_and_torchs(comm, script)
    assert all(map(torch.equal, ours, torchs))
    assert {type(t) for t in ours} == {Tensor}
    kept = partial(fronts.fully_shard, comm=comm, reshard_after_forward=False, mp_policy=policy)
    assert all(map(torch.equal, full_tensors_before_backward(kept), torchs))
