"""What DDP's arguments mean here, and which of torch's are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ringdp.comm import Communicator, over, world
from ringdp.errors import UsageError
from ringdp.parallel.ddp.assign import CAPS, MIB


def caps(one: float | None, several: Sequence[float]) -> tuple[int, ...]:
    """In bytes; both are in MiB, and `several` come first."""
    given = tuple(several) or (() if one is None else (one,))
    if any(cap < 0 for cap in given):
        raise UsageError(f"bucket_cap_mb is {given}; it must be at least 0")
    return tuple(int(cap * MIB) for cap in given) or CAPS


def of_mesh(group: Any, mesh: Any) -> Any:
    """The group that is meant by either argument, or None."""
    if mesh is None:
        return group
    if group is not None or mesh.ndim != 1:
        raise UsageError(f"device_mesh is {mesh!r}; allowed: one dimension, and no process_group")
    return mesh.get_group(mesh_dim=0)


def refuse(**given: Any) -> None:
    for name, value in given.items():
        if value not in (None, False, []):
            raise UsageError(f"{name} is {value!r}; only CPU modules are trained, without {name}")


def communicator(group: Any) -> Communicator:
    if isinstance(group, Communicator):
        return group
    if group is None:
        try:
            return world()
        except UsageError:
            if not (dist.is_available() and dist.is_initialized()):
                raise
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"process_group is {group!r}; it must be a ringdp.Communicator or a "
            "torch.distributed group"
        )
    return over(group)
