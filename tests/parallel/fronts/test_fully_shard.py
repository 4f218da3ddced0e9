"""Several calls of `fully_shard` on one model, and unshard, reshard and prefetching. (Training is
in test_fronts.)"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from ringdp import CommunicationError, Communicator, Offload, UsageError
from ringdp.parallel import fronts
from ringdp.parallel.fronts import fsdp_module
from ringdp.parallel.fronts.fsdp_module import FSDPModule
from ringdp.parallel.fronts.full_tensor import FullTensor
from ringdp.parallel.state import State
from tests.parallel.ddp.cases import gloo
from tests.parallel.small import assert_trains, batch, loss, net
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

BF16 = torch.bfloat16


@on_ranks(2)
def test_options_of_several_calls_are_combined_or_refused(comm: Communicator) -> None:
    def shard(first: Any, second: Any, whole: Any) -> Any:
        model = net()
        for block, options in ((model[1], first), (model[2], second)):
            fronts.fully_shard(block, **{"comm": comm} | options)
        try:
            fronts.fully_shard(model, comm=comm, **whole)
            return model.engine
        finally:
            for module in (model, model[1], model[2]):
                if isinstance(module, FSDPModule):
                    module.engine.close()

    frees, keeps, given = ({"reshard_after_forward": value} for value in (True, False, None))
    low = {"mp_policy": MixedPrecisionPolicy(BF16)}
    out = {"mp_policy": MixedPrecisionPolicy(BF16, output_dtype=torch.float32)}
    offloads = {"offload_policy": CPUOffloadPolicy()}
    for first, second, whole, stage in (
        (given, given, given, 3),
        (given, frees, keeps, 3),  # torch's default, made explicit
        (frees, frees, frees, 3),
        (keeps, keeps, keeps, 2),
        (keeps, keeps, given, 2),
        (low, low, out, 3),
        (out, out, low, 3),
        ({"offload_policy": OffloadPolicy()}, {"mp_policy": MixedPrecisionPolicy()}, given, 3),
        (keeps, frees, given, 3),
        (keeps, keeps, frees, 3),
    ):
        engine = shard(first, second, whole)
        assert engine.stage.number == stage, (first, second, whole)
        if low in (first, whole):
            assert engine.units[1].dtypes == (torch.float32, BF16, torch.float32)
    pageable = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    assert shard(pageable, pageable, pageable).units[0].offload == Offload(True, True, pin=False)
    for first, second, whole, message in (
        (low, low, {}, "mp_policy of module '1' was .*bfloat16.* and is .*None"),
        ({}, low, {}, "mp_policy of module '2'"),
        (
            offloads,
            {},
            offloads,
            r"offload_policy of module '2' was None, and is 'CPUOffloadPolicy\(pin_memory=True\)'",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            shard(first, second, whole)
    message = "within were sharded over 1 ranks, and the model is to be over 2"
    with comm.split(comm.rank) as alone, pytest.raises(UsageError, match=message):
        shard({}, {"comm": alone}, {})

    model: Any = net()
    for module, options in ((model[1], frees), (model, frees), (model, keeps | low)):
        fronts.fully_shard(module, comm=comm, **options)  # new options are accepted after a close
        if module is model:
            assert model.engine.stage.number == (2 if options is not frees else 3)
            with model.engine.full_parameters():
                model.engine.close()


def output_dtypes(shards: Any) -> list[torch.dtype]:
    """Of each module within the model's forward, of the model, and of a module by itself."""
    model, found = net(), list[torch.dtype]()
    for block, dtype in ((model[0], torch.float64), (model[1], None), (model[2], torch.float32)):
        shards(block, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=dtype))
    shards(model, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=torch.float16))
    for block in model:
        block.register_forward_hook(lambda *given: found.append(given[2].dtype))
    found.append(model(batch()).dtype)
    model[0](batch()).sum().backward()
    if hasattr(model, "engine"):
        model.engine.close()
    return found


@on_ranks(2)
def test_each_module_casts_its_outputs_as_with_torchs(comm: Communicator) -> None:
    gloo()
    ours = output_dtypes(partial(fronts.fully_shard, comm=comm))
    assert ours == output_dtypes(torchs_fully_shard)


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
    gloo()
    ours = train_by_layers(comm, partial(fronts.fully_shard, comm=comm))
    assert ours == pytest.approx(train_by_layers(comm, torchs_fully_shard))


@on_ranks(1)
def test_what_modules_ask_for_later_is_checked(comm: Communicator) -> None:
    model: Any = net()
    fronts.fully_shard([*model], comm=comm, reshard_after_forward=False)
    with pytest.raises(UsageError, match="nothing is freed; leave it out in one"):
        model[0].set_reshard_after_forward(True)
    with pytest.raises(UsageError, match=r"\(3\): allowed: True or False"):
        model[0].set_reshard_after_forward(3)
    for wrong in (0, float("nan"), "2", None):
        with pytest.raises(UsageError, match="allowed: a number but 0"):
            model[0].set_gradient_divide_factor(wrong)
    model[0].engine.close()


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
    pair[0].unshard()
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


@on_ranks(1)
def test_no_sync_holds_whatever_modules_ask_for_within(comm: Communicator) -> None:
    model: Any = net()
    for module in (*model, model):
        fronts.fully_shard(module, comm=comm)
    with model.engine.no_sync():
        model.set_reshard_after_forward(False)
        model[0].set_gradient_divide_factor(2.0)
        loss(model).backward()
    with pytest.raises(UsageError, match="have not been reduced"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.engine.close()


def unshard_and_train(comm: Communicator, shards: Any, *, frees: bool) -> list[Any]:
    """Gathers before forwards, uses a weight outside of a forward, and frees after evaluation."""
    model: Any = net()
    for block in (*model, model):
        shards(block, reshard_after_forward=frees)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(3):
        model.unshard()
        handle = model[0].unshard(async_op=True)
        model[1].unshard(async_op=True)  # not waited for here; the forward waits
        handle.wait()
        found.append(model[0][0].weight.detach().clone())
        model[0].reshard()
        value = loss(model, 2 * step + comm.rank)
        model[2].unshard()
        penalty = model[2][0].weight.square().sum()
        model.reshard()
        (value + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [value.item(), loss(model, step).item()]
            model.unshard()
            for block in (*model, model):
                block.reshard()
    if hasattr(model, "engine"):
        assert all(u.state is State.SHARDED for u in model.engine.units)
        weight = model[1][0].weight
        model[1].unshard()
        before = weight.detach().clone()
        model[1].reshard()
        handle = model[1].unshard(async_op=True)
        with torch.no_grad():
            weight += 1  # this rank's slice of it
        handle.wait()
        assert torch.equal(weight, before + 1)
        model[1].reshard()
        handle.wait()
        assert weight.shape != before.shape, "wait() gathered it again"
        model.unshard()
        model[1].unshard()
        with torch.no_grad():
            model[1][0].bias.zero_()
        if frees:
            with pytest.raises(UsageError, match=r"written to while .*: 1\.0\.bias"):
                model[1].reshard()
        model.engine.close()
    return found


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = net(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale


@on_ranks(2)
def test_what_was_resharded_is_gathered_ahead_again(comm: Communicator) -> None:
    model: Any = Scaled()
    for module in (*model.blocks, model):
        fronts.fully_shard(module, comm=comm)
    out = model(batch())
    last = model.engine.units[-1]
    assert last.state is State.GATHERING  # still, for its backward
    model.blocks[-1].reshard()
    found = []
    out.register_hook(lambda _: found.append(last.state))  # after the root's backward has begun
    out.sum().backward()
    assert found == [State.GATHERING]
    model.engine.close()


@pytest.mark.parametrize("frees", [True, False])
@on_ranks(2)
def test_unshard_and_reshard_train_as_with_torchs(comm: Communicator, frees: bool) -> None:
    gloo()
    ours = unshard_and_train(comm, partial(fronts.fully_shard, comm=comm), frees=frees)
    theirs = unshard_and_train(comm, torchs_fully_shard, frees=frees)
    torch.testing.assert_close(ours, theirs)


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
    gloo()
    found = full_tensors(partial(fronts.fully_shard, comm=comm), frees)
    torch.testing.assert_close(found, full_tensors(torchs_fully_shard, frees))
    assert {type(value) for values in found for value in values.values()} == {Tensor}


@on_ranks(2)
def test_state_dicts_become_ordinary_tensors(comm: Communicator, tmp_path: Path) -> None:
    """When it is copied, saved, or assigned to another model."""
    model: Any = net()
    fronts.fully_shard(model, comm=comm)
    state = model.state_dict()
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


def call_again_after_failure(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> str:
    """A collective of this name fails in fully_shard of a model with a sharded block; then it is
    called again."""
    model, calls = net(), 0
    fronts.fully_shard(model[1], comm=comm)
    method = getattr(Communicator, name)

    def raises(self: Communicator, *args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise CommunicationError(f"{name} {at}")
        return method(self, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Communicator, name, raises)
        with pytest.raises(CommunicationError, match=f"{name} {at}"):
            fronts.fully_shard(model, comm=comm)
    try:
        fronts.fully_shard(model, comm=comm)
    except UsageError as e:
        return str(e)
    assert_trains(model.engine, net())
    model.engine.close()
    return ""


@on_ranks(2)
def test_a_failed_call_can_be_repeated_or_is_refused(comm: Communicator) -> None:
    """If no parameter has been sliced yet, the second call works; otherwise it says that the model
    is unusable."""
    with pytest.MonkeyPatch.context() as patch:
        assert call_again_after_failure(comm, patch, "all_gather", 1) == ""  # of the block
        assert call_again_after_failure(comm, patch, "broadcast", 1) == ""  # of the first unit
        for name, at in (("broadcast", 2), ("duplicate", 1), ("duplicate", 2)):
            message = call_again_after_failure(comm, patch, name, at)
            assert "weight is sharded already." in message
            assert "make the model anew" in message
    model: Any = net()
    fronts.fully_shard(model[1], comm=comm)
    with pytest.raises(UsageError, match="reshard_after_forward=3"):
        fronts.fully_shard(model, comm=comm, reshard_after_forward=3)
    with pytest.raises(UsageError, match="3 stands for no ranks"):
        fronts.fully_shard(model, comm=3)
    fronts.fully_shard(model, comm=comm)
    loss(model).backward()
    with pytest.raises(UsageError, match="fully_shard inner modules before those around them"):
        fronts.fully_shard(model[0], comm=comm)
    model.engine.close()
    with pytest.raises(UsageError, match="this model is sharded already"):
        fronts.fully_shard(model, comm=comm)  # closed while its parameters are slices


@on_ranks(1)
def test_a_model_with_an_engine_of_its_own_is_refused_unchanged(comm: Communicator) -> None:
    model = net()
    model[1].add_module("engine", nn.Linear(2, 2))
    fronts.fully_shard(model[2], comm=comm)
    with pytest.raises(UsageError, match=r"Sequential\.engine.*another name"):
        fronts.fully_shard(model[1], comm=comm)
    assert not isinstance(model[1], FSDPModule)
    model[0].engine = "an attribute"
    with pytest.raises(UsageError, match=r"Sequential\.engine.*another name"):
        fronts.fully_shard(model[0], comm=comm)
    assert model[0].engine == "an attribute"
    fronts.fully_shard(model, comm=comm).engine.close()


@on_ranks(2)
def test_a_weight_tied_between_modules_must_be_sharded_around_both(comm: Communicator) -> None:
    model: Any = net()
    model[1][0].weight = model[0][0].weight
    fronts.fully_shard(model[0], comm=comm)
    with pytest.raises(UsageError, match="has it, too, shard one around both in place of each"):
        fronts.fully_shard(model[1], comm=comm)
    model[0].engine.close()


def accumulate(comm: Communicator, shards: Any) -> list[float]:
    """A script that prefetches two blocks and accumulates gradients."""
    model: Any = net()
    for block in (*model, model):
        shards(block)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        model.set_is_last_backward(step % 2 == 1)
        model.set_requires_gradient_sync(step % 2 == 1)
        model[step % 3].set_requires_gradient_sync(True)
        model.set_requires_all_reduce(step % 2 == 1)
        (value := loss(model, 2 * step + comm.rank)).backward()
        losses.append(value.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    if hasattr(model, "engine"):
        sizes = [u.bytes for u in model.engine.units]
        assert model.engine.gathering.limit == sum(sizes[-2:])
        with pytest.raises(UsageError, match="fully_shard has not sharded Linear"):
            model[0].set_modules_to_forward_prefetch([model[0][0]])
        model.engine.close()
    return losses


@on_ranks(2)
def test_prefetching_and_accumulation_train_as_with_torchs(comm: Communicator) -> None:
    gloo()
    ours = accumulate(comm, lambda block: fronts.fully_shard(block, comm=comm))
    assert ours == pytest.approx(accumulate(comm, torchs_fully_shard))
