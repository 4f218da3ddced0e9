"""Which ranks are meant where torch takes a group or a mesh."""

from __future__ import annotations

from typing import Any

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
