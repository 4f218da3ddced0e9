"""The ranks and the device that torch's process_group and device_mesh arguments mean.

For replicas (see `ranks`) they are a mesh of two dimensions, replicas and shards, or two groups,
of shards and of replicas.

A model on the CPU is moved to its rank's GPU, as torch's FSDP does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, get_process_group_ranks, get_rank, get_world_size, group
from torch.distributed.device_mesh import DeviceMesh

from ringdp.comm import Communicator, communicator_of
from ringdp.errors import ModelError, UsageError


def of_mesh(ranks: Any, mesh: Any) -> Any:
    """The group that either argument means, or None."""
    if mesh is None:
        return ranks
    if ranks is not None:
        raise ModelError(
            "Cannot specify both process_group and device_mesh arguments. They are "
            f"{ranks!r} and {mesh!r}; give one"
        )
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ModelError(f"Only 1D device mesh is supported, but got {mesh!r}: give a part of it")
    return mesh.get_group(mesh_dim=0)


def with_replicas(ranks: Any, mesh: Any) -> tuple[Any, int | None, torch.device | None]:
    """The group that either argument means, which may ask for replicas; shard_size then; and the
    current GPU for a mesh of GPUs. Raises UsageError for ranks in another order than ascending."""
    size: int | None = None
    dimensions = mesh.ndim if isinstance(mesh, DeviceMesh) else 0
    if mesh is not None and ranks is None and dimensions not in (1, 2):
        raise ModelError(
            f"the mesh is {mesh!r}; allowed: a DeviceMesh of shards, or of both replicas "
            "and shards; give that part of a larger one"
        )
    if dimensions == 2:
        members = mesh.mesh.flatten().tolist()
        if members != sorted(members):
            raise UsageError(
                f"a mesh for replicas of ranks {mesh.mesh.tolist()}; allowed: ascending ones"
            )
        if mesh.mesh_dim_names is None:
            raise UsageError(
                f"a mesh for replicas of ranks {mesh.mesh.tolist()} without mesh_dim_names; give "
                "it some, such as ('replicate', 'shard')"
            )
        mesh, size = mesh._flatten(), mesh.size(1)
    elif isinstance(ranks, tuple):
        if [isinstance(each, ProcessGroup) for each in ranks] != [True, True]:
            raise UsageError(f"process_group={ranks!r}; allowed: two groups, shards and replicas")
        shards, replicas = map(get_process_group_ranks, ranks)
        rank, world, size = get_rank(), get_world_size(), len(shards)
        replica, shard = divmod(rank, size)
        consecutive = shards == [*range(replica * size, (replica + 1) * size)]
        if not consecutive or replicas != [*range(shard, world, size)]:
            raise UsageError(
                f"process_group of shards {shards} and replicas {replicas} on rank {rank}; allowed:"
                " the first of consecutive ranks, the second of those that have the same shard, "
                f"both together all {world}"
            )
        ranks = group.WORLD
    found = of_mesh(ranks, mesh)
    if mesh is None or mesh.device_type != "cuda":
        return found, size, None
    return found, size, torch.device("cuda", torch.cuda.current_device())


def localize(module: nn.Module, mesh: Any) -> None:
    """If `mesh` is a dimension of a larger one, whose others are for tensor parallelism: keep local
    parts of DTensors in the model outside its forwards, as torch's DDP does."""
    if mesh is None or mesh._get_root_mesh() == mesh:
        return
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform  # takes 0.5 s

    _pre_dp_module_transform(module)


def move_to_ranks(
    model: nn.Module,
    ranks: Communicator | ProcessGroup | None,
    device: torch.device | None = None,
) -> Communicator:
    """Move what is on the CPU to `device`, by default the communicator's. Parameters stay the same
    objects. Returns the communicator (see `communicator_of`)."""
    if device is None:
        placed = [t for t in model.parameters() if t.device.type != "cpu"]
        device = communicator_of(ranks, placed).device
    for t in (*model.parameters(), *model.buffers()):
        if t.device.type == "cpu":
            t.data = t.data.to(device)
    return communicator_of(ranks, model.parameters())
