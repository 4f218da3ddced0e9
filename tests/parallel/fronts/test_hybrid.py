"""Parts of the ranks in the fronts: replicas (FSDP's HYBRID_SHARD, fully_shard's meshes, MiCS in
DeepSpeed), and units gathered from pieces (fully_shard's reshard_after_forward, DeepSpeed's hpZ).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from ringdp import Communicator, UsageError
from ringdp.comm import rendezvous
from ringdp.parallel import fronts
from ringdp.parallel.fronts.fsdp_module import FSDPModule
from tests.parallel.ddp.cases import gloo
from tests.parallel.fronts.test_fronts import net, train
from tests.parallel.fronts.test_initialize import NAMED
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(4)
def test_replicas_have_the_bits_of_torchs(comm: Communicator) -> None:
    """Of a mesh, of two groups, and of torchrun's hosts: torch's classes over gloo sum in the same
    order, as two ranks do."""
    gloo()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    groups = mesh.get_group("shards"), mesh.get_group("replicas")
    torchs = net()
    fully_shard(torchs, mesh=mesh)
    exact = train(comm, torchs, torch.optim.AdamW(torchs.parameters()))
    hybrid, zero_2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_worlds", [])
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        for stage, wrap in (
            (3, lambda: fronts.fully_shard(net(), mesh=mesh)),
            (3, lambda: fronts.fully_shard(net(), comm=groups)),
            (3, lambda: wrapped_blocks(mesh, mesh)),
            (3, lambda: fronts.FullyShardedDataParallel(net(), None, hybrid)),
            (2, lambda: fronts.FullyShardedDataParallel(net(), groups, zero_2)),
            (3, lambda: fronts.FullyShardedDataParallel(net(), None, hybrid, device_mesh=mesh)),
        ):
            model = wrap()
            engine = model.engine
            assert (engine.stage.number, engine.shards.size) == (stage, 2)
            assert train(comm, model, torch.optim.AdamW(model.parameters())) == exact
            engine.close()
        fsdp_1 = fronts.FullyShardedDataParallel
        mixed = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("replicas", "shards"))
        crossed = mixed.get_group("shards"), mixed.get_group("replicas")
        for wrap, message in (
            (lambda: fsdp_1(net(), groups[::-1], hybrid), r"shards \[., .\] and replicas \[., .\]"),
            (lambda: fsdp_1(net(), crossed, hybrid), r"shards \[(0, 3|1, 2)\] and replicas"),
            (lambda: fsdp_1(net(), groups[:1] * 2, hybrid), r"\[., .\] on rank .*the same shard"),
            (lambda: fsdp_1(net(), groups[:1], hybrid), "allowed: two groups"),
            (lambda: fronts.fully_shard(net(), comm=(comm, comm)), "allowed: two groups"),
            (lambda: wrapped_blocks(mesh, None), "over each 2 of 4 .* over each 4;"),
            (lambda: wrapped_blocks(None, mesh), "over each 4 of 4 .* over each 2;"),
            (lambda: fsdp_1(net(), groups, "FULL_SHARD"), "FULL_SHARD with .*allowed: a pair"),
            (lambda: fsdp_1(net(), groups[0], hybrid), "HYBRID_SHARD with .*allowed: a pair"),
            (lambda: fronts.fully_shard(net(), mesh=DeviceMesh("cpu", [[0, 2], [1, 3]])), "ascend"),
            (lambda: fronts.fully_shard(net(), mesh=DeviceMesh("cpu", [[0, 1], [2, 3]])), "names"),
        ):
            with pytest.raises(UsageError, match=message):
                wrap()


def wrapped_blocks(mesh: DeviceMesh | None, outer: DeviceMesh | None) -> nn.Module:
    model = net()
    for block in model:
        fronts.fully_shard(block, mesh=mesh)
    return fronts.fully_shard(model, mesh=outer)


def kept_by(comm: Communicator, *sizes: int | None, model: int | None = None) -> FSDPModule:
    """Shards the model's blocks, and the model, with these `reshard_after_forward`."""
    made: Any = net()
    for block, size in zip(made, sizes, strict=True):
        fronts.fully_shard(block, comm=comm, reshard_after_forward=size)
    return fronts.fully_shard(made, comm=comm, reshard_after_forward=model)


@on_ranks(4)
def test_fully_shard_keeps_pieces_with_the_bits_of_torchs(comm: Communicator) -> None:
    """Torch's over ringdp's backend, as gloo adds what four ranks have in another order."""
    gloo()
    mesh = DeviceMesh.from_group(dist.new_group(backend="ringdp"), "cpu")
    torchs = net()
    for module in (*torchs, torchs):
        fully_shard(module, mesh=mesh, reshard_after_forward=2)
    exact = train(comm, torchs, torch.optim.AdamW(torchs.parameters()))
    dist.destroy_process_group(mesh.get_group())
    for sizes, kept, frees in (
        ((2, 2, 2), [2, 2, 2], [1, 2, 3]),
        ((2, True, None), [2, 0, 0], [1, 2, 3]),
        ((1, 2, False), [0, 2, 0], [2]),
        ((4, 4, 4), [0, 0, 0], [1, 2, 3]),
    ):
        model = kept_by(comm, *sizes)
        engine = model.engine
        assert [unit.piece.near.size if unit.piece.near else 0 for unit in engine.units[1:]] == kept
        assert {1, 2, 3} - engine.gathering.kept == {*frees}
        sent = engine.sent_bytes()
        optimizer = torch.optim.AdamW(model.parameters())
        assert train(comm, model, optimizer) == exact
        assert engine.sent_bytes() - sent == len(exact) * engine.traffic_formula()
        assert engine.memory(optimizer) == engine.memory_formula()
        model.set_reshard_after_forward(True)
        assert not any(unit.piece.near for unit in engine.units)
        engine.close()
    model = kept_by(comm, 2, 2, 2, model=2)
    assert model.engine.ledger.ranks.near is not None
    for wrong, message in (
        (
            (2, 4, 4),
            r"reshard_after_forward is \[2, 4\] in calls for one model; allowed: one number",
        ),
        ((3, 2, 2), r"reshard_after_forward is 3, over 4 ranks; allowed: \[1, 2, 4\]"),
    ):
        with pytest.raises(UsageError, match=message):
            kept_by(comm, *wrong)


@on_ranks(4)
def test_hpz_keeps_pieces(comm: Communicator) -> None:
    for size, near in ((2, 2), (1, None)):
        zero = {"stage": 3, "zero_hpz_partition_size": size}
        config = NAMED | {"zero_optimization": zero}
        engine, *_ = fronts.initialize(model=net(), config=config, comm=comm)
        found = engine.engine.ledger.ranks.near
        assert (found and found.size) == near
        engine.engine.close()


@on_ranks(4)
def test_mics_makes_replicas(comm: Communicator) -> None:
    for size, shards in ((2, 2), (-1, 4)):
        zero = {"stage": 3, "mics_shard_size": size, "mics_hierarchical_params_gather": False}
        config = NAMED | {"zero_optimization": zero}
        engine, *_ = fronts.initialize(model=net(), config=config, comm=comm)
        assert engine.engine.shards.size == shards
        assert engine.world_size == 4
        engine.engine.close()
