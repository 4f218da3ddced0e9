"""Checks and interprets DDP's arguments and the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import SyncBatchNorm as _TorchsSyncBatchNorm

from ringdp.comm import Communicator
from ringdp.errors import ModelError, UsageError
from ringdp.parallel.ddp.bucketing import CAPS, MIB, WIRED


class Trainable(NamedTuple):
    """A parameter that trains; `sparse`: its gradient will be sparse."""

    name: str
    parameter: nn.Parameter
    sparse: bool


class Settings(NamedTuple):
    """DDP's arguments of the same names; `caps`: bytes of buckets, see `bucketing`."""

    caps: tuple[int, ...]
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool = False

    @property
    def seeks_unused(self) -> bool:
        """Unused parameters are determined in every backward."""
        return self.find_unused_parameters and not self.static_graph

    @property
    def has_unused(self) -> bool:
        """Parameters may lack a gradient."""
        return self.find_unused_parameters or self.static_graph


def caps(one: float | None, several: Sequence[float], comm: Communicator) -> tuple[int, ...]:
    """The buckets' caps in bytes; `one` and `several` are in MiB, and `several` wins."""
    given = tuple(several) or (() if one is None else (one,))
    if any(cap < 0 for cap in given):
        raise UsageError(f"bucket_cap_mb is {given}; it must be at least 0")
    return tuple(int(cap * MIB) for cap in given) or (WIRED if comm.wired else CAPS)


def place(
    parameters: Iterable[Tensor], device_ids: Sequence[Any] | None, output_device: Any
) -> torch.device | None:
    """The device that inputs are moved to, None without device_ids and output_device.

    Both must name the one GPU of the parameters; as in torch, [] and 0 may be given with any model.
    """
    if not device_ids and not output_device:
        return None
    devices = {p.device for p in parameters}
    device = next(iter(devices))
    named = [*(device_ids or ()), device if output_device is None else output_device]
    fit = len(devices) == 1 and device.type != "cpu" and len(named) == 2
    if not (fit and all(_names(one, device) for one in named)):
        raise UsageError(
            "DistributedDataParallel device_ids and output_device arguments only work with a "
            "module on a single GPU, which both name. These are device_ids "
            f"{device_ids}, output_device {output_device} and parameters on "
            f"{', '.join(sorted(map(str, devices)))}; allowed: neither of them, and inputs where "
            "the parameters are"
        )
    return device


def _names(given: Any, device: torch.device) -> bool:
    """Whether `given`, an index or a device, means `device`."""
    if isinstance(given, int):
        return given == device.index
    named = torch.device(given)
    return named.type == device.type and named.index in (None, device.index)


def syncs(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are broadcast (at construction, before every forward)."""
    if broadcast_buffers is not None:
        warnings.warn(
            "broadcast_buffers is deprecated, by torch too: use forward_sync_buffers, which "
            "leaves the broadcast at construction as it is",
            FutureWarning,
            stacklevel=3,
        )
    in_forward = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
    at_first = broadcast_buffers is not False or forward_sync_buffers is not None
    return at_first, in_forward is not False


def trainables(module: nn.Module, ignored: Set[str]) -> list[Trainable]:
    """The trained parameters in the order of `module.parameters()`, without `ignored` names.

    Raises ModelError if none trains, or one is uninitialized; UsageError for torch's SyncBatchNorm.
    """
    found: dict[nn.Parameter, Trainable] = {}
    for prefix, m in module.named_modules():
        sparse = isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        for name, p in m.named_parameters(prefix, recurse=False):
            if p.requires_grad and name not in ignored:
                found.setdefault(p, Trainable(name, p, sparse))
        if isinstance(m, _TorchsSyncBatchNorm):
            raise UsageError(
                f"{prefix}: torch's SyncBatchNorm layers only work with GPU modules; use "
                "ringdp.SyncBatchNorm.convert_sync_batchnorm(model)"
            )
    if not found:
        raise ModelError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter "
            "that requires a gradient. This one has no trainable parameter"
        )
    for name, p, _ in found.values():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(
                "Modules with uninitialized parameters can't be used with "
                f"`DistributedDataParallel`: {name} is one. Run a dummy forward pass of the module "
                "first"
            )
    return list(found.values())


def check_dense(trainables: Sequence[Trainable]) -> None:
    """Raise UsageError for a sparse gradient, which mixed precision cannot reduce."""
    if sparse := [t.name for t in trainables if t.sparse]:
        raise UsageError(
            f"{sparse[0]} gets sparse gradients, which mixed_precision does not take; make its "
            "module with sparse=False, or leave mixed_precision None"
        )


def check_values(trainables: Sequence[Trainable]) -> None:
    """Raise ModelError if a parameter has no values that ranks could have in common."""
    for name, p, _ in trainables:
        if p.is_meta:
            raise ModelError(
                f"{name} is on the meta device, where it has no values to train. Give the module "
                "memory by to_empty(), and values, or use ringdp.shard(stage=0), which does both"
            )
