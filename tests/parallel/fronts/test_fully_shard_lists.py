"""`fully_shard` of a list of modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ringdp import Communicator, UsageError
from ringdp.parallel import fronts
from ringdp.parallel.fronts import fsdp_module
from tests.parallel.fronts.scripts import ours_and_torchs
from tests.parallel.small import assert_trains, batch, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

BF16 = torch.bfloat16


def train_by_layers(comm: Communicator, shards: Any) -> list[float]:
    """A model whose last layers are sharded in one call and stay gathered until backward, as large
    models' norms and heads are; its gradients are divided by a factor of the script's."""
    model: Any = net()
    shards(model[0], reshard_after_forward=True)
    shards([model[1], model[2]], reshard_after_forward=False)
    model[2].set_gradient_divide_factor(5.0)
    shards(model)
    for module in (*model, model):
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        if step == 2:
            for module in (model[0], model[1], model):
                module.set_gradient_divide_factor(1.0)
            model[0].set_reshard_after_forward(False)
        if step == 3:
            model.set_reshard_after_forward(True)
        sent = hasattr(model, "engine") and model.engine.sent_bytes()
        (value := loss(model, 2 * step + comm.rank)).backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(model, "engine"):
            engine, model_1, model_2 = model.engine, model[1].engine, model[2].engine
            assert engine is model_1 is model_2
            kept = "".join(u.plan.name for u in engine.units if u.index in engine.gathering.kept)
            assert kept == ("12", "12", "012", "", "")[step]
            assert engine.sent_bytes() - sent == engine.traffic_formula()
    if hasattr(model, "engine"):
        model.engine.close()
    return losses


@on_ranks(2)
def test_layers_sharded_each_in_its_own_way_train_as_with_torchs(comm: Communicator) -> None:
    ours, torchs = ours_and_torchs(comm, partial(train_by_layers, comm))
    assert ours == pytest.approx(torchs)


@on_ranks(2)
def test_modules_of_one_call_may_share_weights(comm: Communicator) -> None:
    model, twin = net(), net()
    for each in (model, twin):
        each[2][0].weight = each[1][0].weight
    pair = [model[1], model[2]]
    assert fronts.fully_shard(pair, comm=comm) is pair
    fronts.fully_shard(model, comm=comm)
    assert_trains(model.engine, twin)
    shared: Any = pair[0][0].weight
    rest, whole = shared.detach().clone(), shared.full_tensor()
    with pytest.raises(UsageError, match=r"1\.0\.weight .* call its unshard\(\) first"):
        pair[0](batch())
    pair[0].unshard()
    pair[0](batch())
    assert torch.equal(shared.detach(), whole)
    pair[0].reshard()
    assert torch.equal(shared.detach(), rest)
    model.engine.close()


@on_ranks(1)
def test_modules_of_a_list_cast_their_outputs(comm: Communicator) -> None:
    """As they do where each is sharded by itself, if no model around them is sharded."""
    model = net()
    policy = MixedPrecisionPolicy(BF16, output_dtype=torch.float64)
    fronts.fully_shard([model[0], model[1]], comm=comm, mp_policy=policy)
    out = model[1](model[0](batch()))
    assert out.dtype == torch.float64
    out.sum().backward()
    model[0].engine.close()


@on_ranks(1)
def test_a_list_is_asked_once(comm: Communicator) -> None:
    """And not once for each of its modules, of which there may be a hundred."""
    model: Any = net()
    fronts.fully_shard([*model], comm=comm)
    fronts.fully_shard(model, comm=comm)
    with pytest.MonkeyPatch.context() as patch:
        heeded: list[Any] = []
        patch.setattr(fsdp_module, "heed", heeded.append)
        model.set_requires_gradient_sync(False)
    assert heeded == [model, *model]
    model.engine.close()


class Chain(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x.float()


@on_ranks(2)
def test_a_module_list_with_a_forward_is_a_module(comm: Communicator) -> None:
    """Alone, and inside of another."""
    policy = MixedPrecisionPolicy(torch.float64, output_dtype=BF16)
    chain: Any = Chain(net())
    fronts.fully_shard(chain, comm=comm, mp_policy=policy)
    assert chain(batch()).dtype == BF16
    around: Any = nn.Sequential(chain)
    fronts.fully_shard(around, comm=comm, mp_policy=policy)
    assert [u.plan.name for u in around.engine.units] == ["", "0"]
    around(batch()).sum().backward()
    around.engine.close()
