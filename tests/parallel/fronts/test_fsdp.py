"""`FullyShardedDataParallel` apart from training (see test_fronts): state_dicts, nested wrappers,
buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ringdp
from ringdp import Communicator, UsageError
from ringdp.parallel.fronts import FullyShardedDataParallel
from tests.parallel.small import assert_trains, batch, loss, net, step
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

BF16 = torch.bfloat16


def same(found: dict[str, Tensor], model: nn.Module) -> bool:
    exact = model.state_dict()
    return list(found) == list(exact) and all(torch.equal(found[k], v) for k, v in exact.items())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_state_dicts_are_unsharded(comm: Communicator, strategy: str) -> None:
    """The values are unsharded, with torch's keys, and do not change later."""
    wrap = ModuleWrapPolicy({nn.Sequential})
    model = FullyShardedDataParallel(net(), comm, ShardingStrategy[strategy], auto_wrap_policy=wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first = model.state_dict()
    loss(model).backward()
    during = model.state_dict()
    optimizer.step()
    assert same(first, net())
    assert same(during, net())
    assert not same(model.state_dict(), net())
    model.load_state_dict(net(1).state_dict())
    assert same(model.state_dict(), net(1))
    assert loss(model) == loss(net(1))
    one = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, one):
        found = model.state_dict()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            assert same(model.state_dict(), net(1))
    assert same(found, net(1)) if comm.rank == 0 else found == {}
    assert same(model.state_dict(), net(1))
    set_type = FullyShardedDataParallel.set_state_dict_type
    before = set_type(model, StateDictType.FULL_STATE_DICT, one)
    assert before.state_dict_config == FullStateDictConfig()
    assert bool(model.state_dict()) == (comm.rank == 0)
    assert FullyShardedDataParallel.get_state_dict_type(model).state_dict_config == one
    set_type(model, before.state_dict_type, before.state_dict_config)
    assert same(model.state_dict(), net(1))
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with (
            pytest.raises(UsageError, match=f"state_dict_type='{kind.name}' is not implemented"),
            FullyShardedDataParallel.state_dict_type(model, kind),
        ):
            pass
    with pytest.raises(
        UsageError, match=r"optim_state_dict_config=FullStateDictConfig\(.*; allowed"
    ):
        set_type(model, StateDictType.FULL_STATE_DICT, one, one)
    with (
        pytest.raises(UsageError, match="neither Sequential nor a part of it is wrapped"),
        FullyShardedDataParallel.state_dict_type(net(), StateDictType.FULL_STATE_DICT),
    ):
        pass
    model.engine.close()


class ModuleInside(nn.Module):
    """Without the wrapper's prefix, one of its names is another one with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.module = nn.Linear(3, 3), nn.Module()
        self.module.first = nn.Linear(3, 3)


@on_ranks(1)
def test_a_module_may_have_a_child_called_module(comm: Communicator) -> None:
    model = FullyShardedDataParallel(ModuleInside(), comm)
    other = ModuleInside()
    model.load_state_dict(other.state_dict())
    assert same(model.state_dict(), other)
    model.engine.close()


@on_ranks(2)
def test_functions_are_applied_to_whole_parameters(comm: Communicator) -> None:
    def orthogonal(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)

    plain, model = net(), FullyShardedDataParallel(net(), comm)
    for m in (plain, model):
        torch.manual_seed(0)
        assert m.apply(orthogonal) is m
    assert same(model.state_dict(), plain)
    model.engine.close()


@on_ranks(2)
def test_modules_can_be_wrapped_by_hand(comm: Communicator) -> None:
    def wrap(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, comm, **options)

    twin, model = net(), net()
    linear = ModuleWrapPolicy({nn.Linear})
    model[0], model[2] = wrap(model[0], auto_wrap_policy=linear), wrap(model[2])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, model)]
    whole = wrap(model)
    assert [u.plan.name for u in whole.engine.units] == ["", "0.0", "2"]
    for m, optimizer in zip((twin, whole), optimizers, strict=True):
        step(m, optimizer, 0, 1)
    state = whole.state_dict()
    assert list(state) == list(twin.state_dict())
    torch.testing.assert_close(state, dict(twin.state_dict()))
    assert same(model[2].state_dict(), net()[2]) is False
    for call in (model[2].no_sync, lambda: model[2].clip_grad_norm_(1.0)):
        with pytest.raises(UsageError, match="is not implemented for a part of a model"):
            call()
    with whole.no_sync():
        assert not model[0].engine.backwards.sync
    whole.engine.close()
    for options in (
        {"auto_wrap_policy": linear},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"cpu_offload": CPUOffload(offload_params=True)},
    ):
        model = net()
        model[1] = wrap(model[1])
        with pytest.raises(UsageError, match="modules within are wrapped already; allowed around"):
            wrap(model, **options)
        model[1].engine.close()
    model = net()
    with comm.split(comm.rank) as alone:
        model[1] = FullyShardedDataParallel(model[1], alone)
        with pytest.raises(UsageError, match="modules within were sharded over 1 ranks"):
            wrap(model)


@on_ranks(2)
def test_modules_within_may_have_another_mixed_precision(comm: Communicator) -> None:
    model, seen = nn.Sequential(*net(), nn.BatchNorm1d(6), nn.Identity()), list[torch.dtype]()
    low = MixedPrecision(BF16, torch.float32, BF16)
    model[2] = FullyShardedDataParallel(model[2], comm)
    wide = MixedPrecision(torch.float64, buffer_dtype=torch.float64, cast_forward_inputs=True)
    model[3] = FullyShardedDataParallel(model[3], comm, mixed_precision=wide)
    casts = MixedPrecision(BF16, cast_forward_inputs=True)
    model[4] = FullyShardedDataParallel(model[4], comm, mixed_precision=casts)
    whole = FullyShardedDataParallel(model, comm, mixed_precision=low)
    for block in (model[0], model[2].module, model[3].module):
        block.register_forward_pre_hook(
            lambda m, i: seen.extend((i[0].dtype, next(m.parameters()).dtype))
        )
    model[1].register_forward_hook(lambda m, i, out: out.float())
    out = whole(torch.ones(4, 6))
    assert out.dtype == torch.float64  # as with torch's: no cast where there is no parameter
    out.sum().backward()
    assert seen == [BF16, BF16, torch.float32, torch.float32, torch.float64, torch.float64]
    state = whole.state_dict()
    assert {state[f"3.{name}"].dtype for name in ("weight", "running_var")} == {torch.float32}
    whole.engine.close()


@on_ranks(2)
def test_state_of_a_module_with_wrapped_ones_in_it_is_whole(comm: Communicator) -> None:
    model = nn.Sequential(nn.Linear(2, 2), *(FullyShardedDataParallel(net(), comm) for _ in "ab"))
    one = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, one):
        found = model.state_dict()
    assert len(found) == (14 if comm.rank == 0 else 2)
    assert len(model.state_dict()) == 14
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for p in model.parameters():
            p.fill_(3.0)
    assert all(bool((x == 3.0).all()) for x in model.state_dict().values())
    for wrapped in (model[1], model[2]):
        wrapped.engine.close()
    with FullyShardedDataParallel.summon_full_params(net()):
        pass  # all of it is whole


@on_ranks(2)
def test_state_of_nested_wrappers_is_as_was_set_for_the_outer_one(comm: Communicator) -> None:
    """Beside what lies in the dict already, which may be given by place."""
    model = net()
    model[1] = FullyShardedDataParallel(model[1], comm)
    whole = FullyShardedDataParallel(model, comm)
    one, kind = FullStateDictConfig(rank0_only=True), StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model[1], kind, one):
        with FullyShardedDataParallel.state_dict_type(whole, kind):
            assert same(whole.state_dict(destination=None), net())
        assert len(model[1].state_dict()) == (0 if comm.rank else 2)
    with FullyShardedDataParallel.state_dict_type(whole, kind, one):
        assert len(model[1].state_dict()) == (0 if comm.rank else 2)
        beside = nn.Linear(2, 2).state_dict()
        assert len(whole.state_dict(beside, "whole.")) == (2 if comm.rank else 8)  # type: ignore[arg-type]
    whole.engine.close()


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(net(), nn.BatchNorm1d(6))
        self.register_buffer("scale", torch.full((6,), 1.01))
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x * self.scale) * self.count
        return out


def test_buffers_have_mixed_precisions_buffer_dtype():
    comm, policy = ringdp.init(), MixedPrecision(BF16, BF16, buffer_dtype=BF16)
    wrap = ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(
        Buffered(), comm, auto_wrap_policy=wrap, mixed_precision=policy
    )
    seen = {name: b.dtype for name, b in model.module.named_buffers()}
    kept = {name: b.dtype for name, b in Buffered().named_buffers()}
    assert seen == kept | {"scale": BF16}  # batch norms compute in float32
    twin = Buffered()
    twin.scale = twin.scale.to(BF16)
    twin.inner[0].to(BF16)
    low = twin.inner[0](batch().to(BF16) * twin.scale)
    assert torch.equal(model(batch()), (twin.inner[1](low.float()).to(BF16) * twin.count))
    model.engine.close()
    alone = FullyShardedDataParallel(nn.BatchNorm1d(6), comm, mixed_precision=policy)
    assert {b.dtype for b in alone.module.buffers()} == {BF16, torch.int64}  # as with torch's
    alone.engine.close()


@pytest.mark.parametrize("wrap", [None, ModuleWrapPolicy({nn.Linear})])
def test_state_dicts_have_the_buffers_former_dtypes(wrap: Any) -> None:
    options = {"mixed_precision": MixedPrecision(BF16, BF16, BF16), "auto_wrap_policy": wrap}
    model = nn.Sequential(Buffered(), Buffered())
    model[1].register_buffer("twice", model[1].scale)
    plain = {name: value.dtype for name, value in model.state_dict().items()}
    if wrap is None:
        model[0] = FullyShardedDataParallel(model[0], ringdp.init(), **options)
    whole = FullyShardedDataParallel(model, ringdp.init(), **options)
    state = whole.state_dict()
    assert {name: value.dtype for name, value in state.items()} == plain
    whole.load_state_dict(state)
    assert whole.module[1].scale.dtype == BF16
    whole.engine.close()


class Asks(nn.Module):
    """Passes an input that it makes in float32, as positions, to its inner unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit, self.seen = nn.Linear(6, 6), Seen(), list[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype]
        out: Tensor = self.unit(self.first(x.to(self.first.weight.dtype)), torch.ones(6))
        return out


class Seen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        self.seen = [x.dtype, positions.dtype]
        return super().forward(x) * positions


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("all_inputs", [True, False])
def test_inputs_are_cast_of_the_modules_that_torch_casts_them_of(root, all_inputs):
    policy = MixedPrecision(BF16, cast_forward_inputs=all_inputs, cast_root_forward_inputs=root)
    wrap = ModuleWrapPolicy({Seen})
    model = FullyShardedDataParallel(
        Asks(), ringdp.init(), auto_wrap_policy=wrap, mixed_precision=policy
    )
    model(batch())
    assert model.seen == [BF16 if root or all_inputs else torch.float32]
    assert model.unit.seen == [BF16, BF16 if all_inputs else torch.float32]
    model.engine.close()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_modules_without_parameters_can_be_wrapped(comm: Communicator, strategy: str) -> None:
    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, comm, ShardingStrategy[strategy])

    twin, model = net(), net()
    for block in (twin, model):
        block.append(nn.Identity())
    for at, block in enumerate(model):
        model[at] = wrap(block)
    whole = wrap(model)
    assert [u.plan.name for u in whole.engine.units] == ["", "0", "1", "2"]
    assert_trains(whole.engine, twin)
    whole.engine.close()
    alone = wrap(nn.ReLU())
    x = batch().requires_grad_()
    alone(x).sum().backward()
    assert torch.equal(x.grad, (x > 0).float())
    alone.engine.close()


def reset_if_on_meta(module: nn.Module) -> None:
    """Like the functions in torch's own tests."""
    if any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()  # type: ignore[operator]


@on_ranks(2)
def test_param_init_fn_gets_modules_on_the_meta_device(comm: Communicator) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.LSTM(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))

    def wrap(model: nn.Module, init: Any) -> FullyShardedDataParallel:
        policy = ModuleWrapPolicy({nn.LSTM, nn.Linear})
        return FullyShardedDataParallel(model, comm, auto_wrap_policy=policy, param_init_fn=init)

    for init in (reset_if_on_meta, lambda m: m.to_empty(device="cpu", recurse=False)):
        with torch.device("meta"):
            model = make()
        held = [*model.parameters()]
        whole = wrap(model, init)
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        if init is reset_if_on_meta:
            assert all(t.isfinite().all() for t in whole.state_dict().values())
        whole.load_state_dict(make().state_dict())
        assert same(whole.state_dict(), make())
        model[0](torch.ones(2, 3))[0].sum().backward()
        whole.engine.close()
    message = "param_init_fn left weight of a Linear on the meta device; .* to allocate, as by"
    with pytest.raises(UsageError, match=message):
        wrap(nn.Linear(3, 3, device="meta"), nn.Linear.reset_parameters)
    model = make()
    model[1] = FullyShardedDataParallel(model[1], comm)
    with pytest.raises(UsageError, match="param_init_fn=3; allowed: a function"):
        FullyShardedDataParallel(model, comm, param_init_fn=3)
    assert not model[1].engine.closed
    model[1].engine.close()


@pytest.mark.parametrize("kinds", [set(), {nn.Linear}], ids=["in its unit", "units"])
@on_ranks(2)
def test_param_init_fn_may_allocate_modules_within(
    comm: Communicator, kinds: set[type[nn.Module]]
) -> None:
    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        for p in module.parameters(recurse=False):
            nn.init.ones_(p)

    norm = nn.LayerNorm(3, device="meta")
    norm.add_module("within", nn.Linear(3, 3, device="meta"))
    policy = ModuleWrapPolicy(kinds)
    whole = FullyShardedDataParallel(norm, comm, auto_wrap_policy=policy, param_init_fn=fill)
    state = whole.state_dict()
    assert [*state] == ["weight", "bias", "within.weight", "within.bias"]
    assert all((t == 1).all() for t in state.values())
    whole.engine.close()
