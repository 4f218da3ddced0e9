"""Wrong arguments of `shard` and its fronts: the error says what was found and what is allowed, and
the model is unchanged."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import fsdp, optim
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import ringdp
from ringdp import UsageError
from ringdp.parallel import fronts


@pytest.fixture(scope="module")
def comm():
    return ringdp.init()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": 3}, r"shard\(model=3\): allowed: Module"),
        ({"model": torch.inference_mode()(net)()}, r"0\.weight was made in torch\.inference_mode"),
        ({"stage": True}, "it must be 0"),
        ({"stage": 3.0}, "it must be 0"),
        ({"stage": 4}, r"it must be 0 \(DDP\)"),
        ({"unit": "Linear"}, "unit='Linear': allowed: a module class"),
        ({"unit": True}, "unit=True: allowed: a module class"),
        ({"unit": [nn.Linear]}, "allowed: a module class"),
        ({"unit": (nn.Linear, 3)}, "allowed: a module class"),
        ({"unit": 0}, "must be at least 1"),
        ({"precision": torch.bfloat16}, "allowed: Precision or dict or None"),
        ({"offload": True}, "allowed: Offload or None"),
        ({"stage": 2, "offload": ringdp.Offload(parameters=True)}, "in stage 2; it needs stage 3"),
        ({"stage": 0, "offload": ringdp.Offload(optimizer=True)}, "in stage 0; it needs 1, 2 or 3"),
        ({"comm": 3}, "allowed: a ringdp.Communicator, a torch.distributed group, or None"),
        ({"init": 3}, "allowed: Callable or None"),
        ({"prefetch_bytes": "5"}, "prefetch_bytes is '5'; it must be an int"),
        ({"prefetch_bytes": -1}, "prefetch_bytes is -1; it must be an int of at least 0"),
        ({"persist_below": 5.5}, "persist_below is 5.5; it must be an int"),
        ({"persist_below": -1}, "persist_below is -1; it must be an int"),
        ({"persist_below": None}, "persist_below is None; it must be an int"),
        ({"keep": "Linear"}, "keep='Linear': allowed: a module class, a tuple of them, or a pred"),
        ({"keep": nn.LayerNorm}, "LayerNorm.* matches no unit; the units are of BatchNorm1d, L"),
    ],
)
def test_shard_refuses_wrong_arguments(comm, wrong, message):
    model = net()
    with pytest.raises(UsageError, match=message):
        ringdp.shard(**({"model": model, "stage": 3, "comm": comm} | wrong))
    with torch.inference_mode(), pytest.raises(UsageError, match="call it outside of that"):
        ringdp.shard(model, stage=3, comm=comm)
    ringdp.shard(model, stage=3, comm=comm).close()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_buffers_that_cannot_take_rank_0s_values_are_refused(comm):
    """torch would end the process for a quantized one."""
    quantized = torch._empty_affine_quantized([3], dtype=torch.qint8)
    for buffer, kind in ((torch.eye(3).to_sparse(), "sparse_coo"), (quantized, "qint8")):
        model = nn.Linear(2, 2)
        model.register_buffer("kept", buffer)
        for wrap in (
            partial(ringdp.shard, stage=1, comm=comm),
            partial(ringdp.DistributedDataParallel, process_group=comm),
        ):
            with pytest.raises(UsageError, match=f"kept is torch.{kind}; allowed: dense tensors"):
                wrap(model)


class Elsewhere(torch.Tensor):
    """Stands for tensors on other ranks, as a DTensor does."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, *_):
        return cls()


def test_parameters_without_memory_of_their_own_are_refused(comm):
    """As those of a tensor-parallel model, and those that torch's FSDP has freed."""
    freed = nn.Parameter(torch.ones(2))
    freed.untyped_storage().resize_(0)
    for odd in (nn.Parameter(Elsewhere()), freed):
        model = nn.Linear(2, 2)
        model.bias = odd
        for wrap in (
            partial(ringdp.shard, stage=1, comm=comm),
            partial(ringdp.fully_shard, comm=comm),
            partial(ringdp.DistributedDataParallel, process_group=comm),
        ):
            with pytest.raises(UsageError, match=r"bias, a [EP].*, has no memory of"):
                wrap(model)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"module": nn.Linear}, "takes a module; this is a type"),
        ({"sharding_strategy": "SOME_SHARD"}, "SOME_SHARD is not implemented"),
        (
            {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
            "HYBRID_SHARD with process_group=.* and device_mesh=None; allowed: .* under torchrun",
        ),
        ({"ignored_modules": [1]}, "ignored_modules"),
        ({"ignored_states": [*net().parameters()]}, r"ignored_states=\[.*\] is not implemented"),
        ({"cpu_offload": True}, "cpu_offload=True"),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, "BACKWARD_POST"),
        ({"mixed_precision": torch.bfloat16}, "mixed_precision=torch.bfloat16"),
        ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "keep_low_precision"),
        ({"auto_wrap_policy": 3}, "auto_wrap_policy=3; .* a partial of lambda_auto_wrap_policy"),
        (
            {"auto_wrap_policy": CustomPolicy(lambda _: {"device_id": 0})},
            r"gives a Sequential \{'device_id': 0\}; allowed: True or False",
        ),
        ({"process_group": 3}, "allowed: a ringdp.Communicator"),
        pytest.param(
            {"device_id": "cuda"},
            r"device_id='cuda'\): torch sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs that there is none"),
        ),
        ({"device_id": "gpu"}, r"device_id='gpu'\): .*gpu"),
    ],
)
def test_fully_sharded_data_parallel_refuses_wrong_arguments(comm, wrong, message):
    with pytest.raises(UsageError, match=message) as error:
        fronts.FullyShardedDataParallel(**({"module": net(), "process_group": comm} | wrong))
    assert "\n" not in str(error.value)


def test_a_custom_policy_chooses_the_units(comm):
    model = net()
    policy = CustomPolicy(lambda module: module in (model, model[0], model[2]))
    wrapped = fronts.FullyShardedDataParallel(model, comm, auto_wrap_policy=policy)
    assert [unit.plan.name for unit in wrapped.engine.units] == ["", "0", "2"]
    wrapped.engine.close()


def test_batch_norms_stay_in_float32_as_with_torch(comm):
    for policy, kept in ((ModuleWrapPolicy({nn.Linear}), torch.float32), (None, torch.bfloat16)):
        model = fronts.FullyShardedDataParallel(
            net(),
            comm,
            auto_wrap_policy=policy,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            mixed_precision=MixedPrecision(torch.bfloat16),
        )
        (found,) = [
            unit.dtypes.compute
            for unit in model.engine.units
            if any(entry.name == "1.weight" for entry in unit.plan.entries)
        ]
        assert found == kept
        model.engine.close()


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (ringdp.DistributedDataParallel, DistributedDataParallel),
        (fronts.FullyShardedDataParallel, fsdp.FullyShardedDataParallel),
        (fronts.fully_shard, fsdp.fully_shard),
        (ringdp.ZeroRedundancyOptimizer, optim.ZeroRedundancyOptimizer),
    ],
)
def test_fronts_take_the_arguments_of_the_installed_torch_in_order(ours, torchs):
    mine, theirs = (list(inspect.signature(front).parameters) for front in (ours, torchs))
    assert [name for name in mine if name in theirs] == theirs


@dataclass(frozen=True)
class FuturePolicy(MixedPrecisionPolicy):
    """The policy of a future torch, with another field."""

    chosen: object = None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mp_policy": MixedPrecision()}, "allowed: a MixedPrecisionPolicy"),
        (
            {"mp_policy": FuturePolicy(chosen=3)},
            "MixedPrecisionPolicy: chosen=3 is not implemented",
        ),
        ({"offload_policy": True}, "offload_policy is a bool"),
        ({"reshard_after_forward": 0}, r"reshard_after_forward is 0, over 1 ranks; allowed: \[1\]"),
        ({"reshard_after_forward": "2"}, "reshard_after_forward='2'; allowed: None, True"),
        ({"ignored_params": set()}, "ignored_params"),
        ({"dp_mesh_dims": 3}, "dp_mesh_dims=3"),
    ],
)
def test_fully_shard_refuses_wrong_arguments(comm, wrong, message):
    with pytest.raises(UsageError, match=message):
        fronts.fully_shard(net(), comm=comm, **wrong)
    for given, what in (
        (3, "a module; this is a int"),
        ([net(), "x"], "a str"),
        ([], "an empty l"),
    ):
        with pytest.raises(UsageError, match=f"takes .*{what}"):
            fronts.fully_shard(given, comm=comm)
    for given in (nn.ModuleList(net()), nn.ModuleDict({"a": net()})):
        for wrong in (given, [given]):
            with pytest.raises(UsageError, match=r"has no forward.* give a list of the modules in"):
                fronts.fully_shard(wrong, comm=comm)
    fronts.fully_shard(net(), mp_policy=MixedPrecisionPolicy(), comm=comm).engine.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay_all_reduce_named_params": [("0.bias", 3)]},
        {"param_to_hook_all_reduce": 3},
        {"lazy_bucket_allocation": True},
    ],
)
def test_distributed_data_parallel_refuses_unimplemented_arguments(comm, wrong):
    with pytest.raises(
        UsageError, match=f"{next(iter(wrong))}=.* is not implemented; allowed: (None|False)"
    ):
        ringdp.DistributedDataParallel(net(), process_group=comm, **wrong)


def test_distributed_data_parallel_is_named_in_errors_of_its_arguments(comm):
    with pytest.raises(TypeError, match=r"^DistributedDataParallel\.__init__\(\) got .*'wrong'"):
        ringdp.DistributedDataParallel(net(), process_group=comm, wrong=1)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_clipping_refuses_wrong_norms(comm, wrong):
    engine = ringdp.shard(net(), stage=1, comm=comm)
    with pytest.raises(UsageError, match=f"max_norm is {wrong}; it must be above 0"):
        ringdp.clip_grad_norm_(engine, wrong)
    engine.close()


@pytest.mark.parametrize("wrong", [{"lr": -1}, {"eps": -1}, {"betas": (0.9, 1)}, {"betas": (0.9,)}])
def test_adamw_refuses_wrong_options(wrong):
    with pytest.raises(UsageError, match="allowed: nothing below 0, and two betas below 1"):
        ringdp.AdamW(net().parameters(), **wrong)
