"""The fronts with other libraries' names give the bits of `shard` (refused arguments are in
test_arguments)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import ringdp
from ringdp import Communicator, ModelError, Precision, UsageError
from ringdp.comm import rendezvous
from ringdp.parallel import fronts
from tests.parallel.ddp.cases import gloo
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(), Block())


def batch(comm: Communicator, step: int) -> Tensor:
    seed = torch.Generator().manual_seed(10 * step + comm.rank)
    return torch.randn(6, 8, generator=seed)


def train(comm: Communicator, model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        loss = model(batch(comm, step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(comm: Communicator, stage: int, **options: Any) -> list[float]:
    model = net()
    engine = ringdp.shard(model, stage=stage, unit=Block, comm=comm, **options)
    losses = train(comm, model, torch.optim.AdamW(model.parameters()))
    engine.close()
    return losses


@on_ranks(2)
def test_fully_shard_gives_the_bits_of_shard(comm: Communicator) -> None:
    expected = plain(comm, 3)
    for options, same in (
        ({}, expected),
        ({"reshard_after_forward": False}, expected),
        ({"offload_policy": CPUOffloadPolicy()}, expected),
        (
            {"mp_policy": MixedPrecisionPolicy(BF16, torch.float32)},
            plain(comm, 3, precision=Precision(BF16, torch.float32)),
        ),
    ):
        model = net()
        for block in model[1:]:
            fronts.fully_shard(block, comm=comm, **options)
        fronts.fully_shard(model, comm=comm, **options)
        assert isinstance(model, nn.Sequential)
        assert isinstance(model[1], Block)
        engine = model.engine
        assert [u.plan.name for u in engine.units] == ["", "1", "2"]
        assert engine.stage.number == (2 if "reshard_after_forward" in options else 3)
        with pytest.raises(
            UsageError, match=r"engine is a FSDPSequential; allowed: .*\.engine of .* use torch's"
        ):
            ringdp.save("nowhere", model)  # type: ignore[arg-type]
        assert train(comm, model, torch.optim.AdamW(model.parameters())) == same
        model.set_requires_gradient_sync(False)
        sent = engine.sent_bytes()
        model(batch(comm, 9)).float().sum().backward()
        with pytest.raises(UsageError, match="within no_sync"):
            engine.check_reduced("gradients are read")
        assert engine.sent_bytes() >= sent
        engine.close()


@on_ranks(2)
def test_fully_sharded_data_parallel_gives_the_bits_of_shard(comm: Communicator) -> None:
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    for strategy, wrap, options, stage in (
        ("FULL_SHARD", policy, {}, 3),
        ("SHARD_GRAD_OP", ModuleWrapPolicy({Block}), {"cpu_offload": CPUOffload(True)}, 2),
        ("NO_SHARD", partial(size_based_auto_wrap_policy, min_num_params=200), {}, 0),
        ("FULL_SHARD", policy, {"mixed_precision": MixedPrecision(BF16, torch.float32)}, 3),
    ):
        model = fronts.FullyShardedDataParallel(
            net(),
            comm,
            ShardingStrategy[strategy],
            auto_wrap_policy=wrap,
            **options,
        )
        assert [u.plan.name for u in model.engine.units] == ["", "1", "2"]
        precision = Precision(BF16, torch.float32) if "mixed_precision" in options else None
        optimizer = torch.optim.AdamW(model.parameters())
        assert train(comm, model, optimizer) == plain(comm, stage, precision=precision)
        with model.no_sync():
            model(batch(comm, 4)).float().sum().backward()
        model(batch(comm, 4)).float().sum().backward()
        assert model.clip_grad_norm_(0.5) > 0.5
        with fronts.FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            model.module[0].weight.fill_(3.0)
        with model.engine.full_parameters():
            assert model.module[0].weight.eq(3).all()
        state = {n: v + 1 for n, v in net().state_dict().items()}
        outer = nn.Sequential(model)
        for module, prefix in ((model, ""), (outer, "0.")):
            prefixed = {prefix + n: v for n, v in state.items()}
            with model.engine.full_parameters(write=True):
                module.load_state_dict(prefixed)
                found = module.state_dict()  # with torch's keys
                assert list(found) == list(prefixed)
                assert all(torch.equal(found[n], v) for n, v in prefixed.items())
        # the wrapper forwards unknown attributes to the module
        assert model.append == model.module.append
        model.engine.close()


@on_ranks(3)
def test_zero_redundancy_optimizer_gives_the_bits_of_the_whole_one(comm: Communicator) -> None:
    model = ringdp.DistributedDataParallel(net(), process_group=comm)
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights}, {"params": biases, "lr": 0.01}]
    optimizer = fronts.ZeroRedundancyOptimizer(groups, ringdp.AdamW, comm, lr=0.1)
    twin = ringdp.DistributedDataParallel(net(), process_group=comm)
    names = [[p for p in twin.parameters() if p.dim() == d] for d in (2, 1)]
    plain = ringdp.AdamW([{"params": names[0]}, {"params": names[1], "lr": 0.01}], lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, plain)]
    for _ in range(2):
        assert train(comm, model, optimizer) == train(comm, twin, plain)
        for s in schedules:
            s.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    defaults = fronts.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, comm)
    torch.optim.lr_scheduler.OneCycleLR(defaults, 0.1, total_steps=2)  # reads lr and betas
    held = sum(s["exp_avg"].numel() for s in optimizer.optim.state.values())
    total = sum(p.numel() for p in model.parameters())
    assert held <= total // comm.size + 16
    with pytest.raises(UsageError, match=r"LBFGS looks at all parameters .* in Zero"):
        fronts.ZeroRedundancyOptimizer(model.parameters(), torch.optim.LBFGS, comm)
    with pytest.raises(UsageError, match="add_param_group is not implemented"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@on_ranks(2)
def test_zero_redundancy_optimizer_steps_moved_parameters_and_keeps_no_gradients(
    comm: Communicator,
) -> None:
    """It steps parameters whose memory has changed since it was made, and keeps no reference to
    gradients, for which DDP would have to copy them."""
    model = ringdp.DistributedDataParallel(net(), process_group=comm)
    optimizer = fronts.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, comm, lr=0.1)
    twin = ringdp.DistributedDataParallel(net(), process_group=comm)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    flats = []
    for _ in range(3):
        for p in (*model.parameters(), *twin.parameters()):
            p.data = p.data.clamp(-0.5, 0.5)
        assert train(comm, model, optimizer) == train(comm, twin, plain)
        flats.append([bucket.flat.data_ptr() for bucket in model.reducer.buckets])
    assert flats[1] == flats[2]  # the first backward rebuilds the buckets


@on_ranks(2)
def test_fronts_take_torchs_groups_and_meshes(comm: Communicator) -> None:
    """Scripts that use only torch's groups and meshes."""
    gloo()
    expected = plain(comm, 3)
    mesh = init_device_mesh("cpu", (comm.size,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_worlds", [])
        for wrap in (
            lambda: fronts.fully_shard(net()),
            lambda: fronts.fully_shard(net(), mesh=mesh),
            lambda: fronts.FullyShardedDataParallel(net(), dist.new_group(range(comm.size))),
            lambda: fronts.FullyShardedDataParallel(net(), device_mesh=mesh),
        ):
            model = wrap()
            assert train(comm, model, torch.optim.AdamW(model.parameters())) == expected
            model.engine.close()
        model = ringdp.DistributedDataParallel(net())
        optimizer = fronts.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        assert train(comm, model, optimizer) == expected
        for wrong in (1, init_device_mesh("cpu", (1, 1, comm.size))):
            with pytest.raises(
                ModelError, match="allowed: a DeviceMesh of shards, or of both replicas and shards"
            ):
                fronts.fully_shard(net(), mesh=wrong)
    with pytest.raises(ModelError, match="give one"):
        fronts.fully_shard(net(), mesh=mesh, comm=comm)


@on_ranks(2)
def test_frozen_models_and_copies_work(comm: Communicator) -> None:
    """A frozen block, a wholly frozen model, and deep copies of both."""
    single = net().requires_grad_(False)
    for wrap, blocks in (
        (lambda m: fronts.fully_shard(m, comm=comm), True),
        (lambda m: fronts.FullyShardedDataParallel(m, comm), False),
    ):
        model = net()
        model[1].requires_grad_(False)
        if blocks:
            wrap(model[1])
        student, teacher = wrap(model), wrap(net().requires_grad_(False))
        optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], 0.1)
        for step in range(2):
            x = batch(comm, step)
            out = student(x)
            hidden, found = out.detach().requires_grad_(), out.detach().requires_grad_()
            single(hidden).square().sum().backward()
            teacher(found).square().sum().backward()
            assert torch.equal(hidden.grad, found.grad)
            teacher(out).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        x = batch(comm, 5)
        with student.engine.full_parameters():
            twin = copy.deepcopy(student)
        assert type(twin) is nn.Sequential
        assert type(twin[1]) is Block
        assert torch.equal(twin(x), student(x))
        wrap(twin).engine.close()
        for engine in (student.engine, teacher.engine):
            engine.close()


def train_with_config(
    comm: Communicator, stage: int, zero: dict[str, Any] | None = None, **more: Any
) -> tuple[list[float], Any]:
    """The losses, and the engine. `zero`, `more`: in the section of ZeRO, and beside it."""
    config = {
        "train_batch_size": 12 * comm.size,
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }
    trainer, optimizer, _, _ = fronts.initialize(
        model=net(), config=config, optimizer=ringdp.AdamW, unit=Block, comm=comm
    )
    losses = []
    assert not trainer.eval().training
    trainer.train()
    for step in range(4):
        loss = trainer(batch(comm, step)).float().square().mean()
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.item())
    assert (trainer.batches.micro, trainer.batches.accumulation) == (6, 2)
    assert isinstance(optimizer, ringdp.AdamW)
    trainer.engine.close()
    return losses, trainer.engine


@on_ranks(2)
def test_initialize_gives_equal_losses_in_all_stages(comm: Communicator) -> None:
    expected, _ = train_with_config(comm, 0)
    offload = {"device": "cpu", "pin_memory": True}
    every = {
        "overlap_comm": False,
        "contiguous_gradients": True,
        "offload_optimizer": offload,
        "offload_param": offload,
        "stage3_prefetch_bucket_size": 300,
        "stage3_param_persistence_threshold": 10,
        "stage3_max_live_parameters": 800,
    }
    for stage, zero in ((1, {"allgather_bucket_size": 280}), (2, {}), (3, {}), (3, every)):
        assert train_with_config(comm, stage, zero)[0] == expected
    _, engine = train_with_config(comm, 3, {"stage3_max_live_parameters": 500})
    assert engine.gathering.limit < 4 * 272
    scaled = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
    for half in ({"bf16": {"enabled": True}}, {"fp16": scaled}):
        assert train_with_config(comm, 1, **half)[0] == train_with_config(comm, 3, **half)[0]
