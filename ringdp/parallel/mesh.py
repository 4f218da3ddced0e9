"""Which ranks, and which device, are meant where torch takes a group or a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringdp.errors import ModelError


def of_mesh(group: Any, mesh: Any) -> Any:
    """The group that is meant by either argument, or None."""
    if mesh is None:
        return group
    if group is not None:
        raise ModelError(
            "Cannot specify both process_group and device_mesh arguments. They are "
            f"{group!r} and {mesh!r}; give one"
        )
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ModelError(f"Only 1D device mesh is supported, but got {mesh!r}: give a part of it")
    return mesh.get_group(mesh_dim=0)


def device_of(mesh: Any) -> torch.device | None:
    """That a mesh of GPUs means on this rank: the current one."""
    if mesh is None or mesh.device_type != "cuda":
        return None
    return torch.device("cuda", torch.cuda.current_device())


def localize(module: nn.Module, mesh: Any) -> None:
    """Outside its forwards the model holds this rank's parts of DTensors, as torch's DDP does it
    where `mesh` is a part of one: tensor parallelism is along the others of its dimensions."""
    if mesh is None or mesh._get_root_mesh() == mesh:
        return
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform  # takes 0.5 s

    _pre_dp_module_transform(module)
