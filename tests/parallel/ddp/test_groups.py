"""DistributedDataParallel over torch's process groups and device meshes."""

from __future__ import annotations

import copy

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ringdp import Communicator, DistributedDataParallel, SyncBatchNorm, UsageError
from ringdp.comm import rendezvous
from tests.equal import equal
from tests.parallel.ddp.cases import (
    TORCHS,
    WIDTH,
    Wrap,
    backward,
    error_text,
    gloo,
    gradients,
    loss,
    mlp,
    ours_and_torchs,
    rows,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


@on_ranks(2)
def test_ddp_works_over_torchs_groups(comm: Communicator) -> None:
    """Over torch's default group, if ringdp.init has not been called."""
    gloo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_worlds", [])
        net = DistributedDataParallel(mlp())
        explicit = DistributedDataParallel(
            copy.deepcopy(net.module), process_group=dist.new_group([0, 1])
        )
        assert equal(backward(net, 0, comm.rank), backward(explicit, 0, comm.rank))
        normed = DistributedDataParallel(SyncBatchNorm(WIDTH))
        normed(rows(0, comm.rank)).square().sum().backward()
        theirs = TORCHS(copy.deepcopy(net.module))
        assert equal(backward(theirs, 0, comm.rank), gradients(net))
        assert normed.comm is net.comm is not comm


@on_ranks(4)
def test_ddp_and_tensor_parallelism_share_a_mesh(comm: Communicator) -> None:
    def found(wrap: Wrap) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        whole = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        net = wrap(parallelize_module(whole, mesh["tensor"], plan), device_mesh=mesh["data"])
        parameters, seen = list(net.parameters()), []
        for step in range(2):
            loss(net(rows(step, mesh["data"].get_local_rank()))).backward()
            seen += [p.grad.clone() for p in parameters]
        return seen

    assert equal(*ours_and_torchs(found))


@on_ranks(2)
def test_mesh_and_bucket_arguments_mean_the_same_as_torchs(comm: Communicator) -> None:
    gloo()
    mesh = init_device_mesh("cpu", (comm.size,))
    net = DistributedDataParallel(mlp(), device_mesh=mesh, bucket_cap_mb_list=[0, 0.001])
    assert net.process_group is mesh.get_group()
    assert net.reducer.settings.caps == (0, 1048)
    assert len(net.reducer.buckets[0].slots) == 1
    assert len(backward(net, 0, comm.rank)) == len(list(net.parameters()))
    error_text(
        lambda: DistributedDataParallel(mlp(), process_group=comm, device_mesh=mesh), UsageError
    )
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        assert not DistributedDataParallel(mlp(), broadcast_buffers=False).forward_sync_buffers
