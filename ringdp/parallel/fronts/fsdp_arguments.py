"""Translates FullyShardedDataParallel's arguments: torch's policies, dtypes and devices."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel.mesh import with_replicas
from ringdp.parallel.meta import Init
from ringdp.parallel.precision import Precision, kept, of_modules
from ringdp.parallel.refuse import refuse

STAGES = {  # of each ShardingStrategy
    "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2,
}  # fmt: skip


def strategy_of(given: Any) -> tuple[str, int]:
    """The ShardingStrategy's name, and its stage. Raises UsageError for another."""
    name = getattr(given, "name", given) or "FULL_SHARD"
    if name not in STAGES:
        raise UsageError(
            f"FullyShardedDataParallel: sharding_strategy {name} is not implemented; "
            f"allowed: {', '.join(STAGES)}"
        )
    return name, STAGES[name]


def device_of(device_id: Any, module: nn.Module) -> torch.device | None:
    """Raises UsageError if the module cannot be there."""
    if device_id is None:
        return None
    try:
        device = torch.device(device_id)
    except (RuntimeError, TypeError) as e:
        raise _refused(device_id, str(e)) from e
    if device.type == "cuda" and not torch.cuda.is_available():
        raise _refused(device_id, "torch sees no GPU here")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    placed = {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")}
    if elsewhere := placed - {device}:
        raise _refused(device_id, f"parameters are on {', '.join(map(str, elsewhere))}")
    return device


def _refused(device_id: object, why: str) -> UsageError:
    return UsageError(f"FullyShardedDataParallel(device_id={device_id!r}): {why}")


def ranks_for(
    strategy: str, process_group: Any, device_mesh: Any
) -> tuple[ProcessGroup | Communicator | None, int | None, torch.device | None]:
    """As `with_replicas`. Raises UsageError if it does not fit the strategy."""
    found, shard_size, device = with_replicas(process_group, device_mesh)
    hybrid = "HYBRID" in strategy
    if hybrid and found is None:
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        shard_size = int(local) if local.isdecimal() else None
    if hybrid != (shard_size is not None):
        raise UsageError(
            f"FullyShardedDataParallel: {strategy} with process_group={process_group!r} and "
            f"device_mesh={device_mesh!r}; allowed: a pair of groups, or a mesh of two dimensions, "
            "with HYBRID_SHARD and _HYBRID_SHARD_ZERO2; these also without either, under torchrun"
        )
    return found, shard_size, device


def units_of(model: nn.Module, policy: Any) -> set[nn.Module]:
    """The modules that torch would wrap. Raises UsageError for what is no policy, or asks for other
    arguments for some."""
    from torch.distributed.fsdp.wrap import (  # who has a policy has loaded it
        CustomPolicy,
        _recursive_wrap,
    )

    if isinstance(policy, CustomPolicy):
        found = policy._run_policy(model, set(), {})
        for module, asked in found.items():
            if asked:
                raise UsageError(
                    f"FullyShardedDataParallel: the CustomPolicy gives a {type(module).__name__} "
                    f"{asked}; allowed: True or False, and the same arguments for all modules"
                )
        return {*found} - {model}
    if not callable(policy):
        raise UsageError(
            f"FullyShardedDataParallel: auto_wrap_policy={policy!r}; allowed: a ModuleWrapPolicy, a"
            " CustomPolicy, a function such as a partial of lambda_auto_wrap_policy, or None"
        )
    chosen: set[nn.Module] = set()

    def choose(module: nn.Module) -> nn.Module:
        chosen.add(module)
        return module  # in its own place

    _recursive_wrap(model, policy, choose, set(), set(), only_wrap_children=True)
    return chosen


def field(argument: str, value: object, name: str) -> bool:
    if not hasattr(value, name):
        raise UsageError(
            f"FullyShardedDataParallel: {argument}={value!r}; allowed: torch's class, with a {name}"
        )
    return bool(getattr(value, name))


def precision_of(policy: Any, *, wraps: bool) -> Precision | None:
    if policy is None:
        return None
    casts = field("mixed_precision", policy, "cast_forward_inputs")
    refuse("MixedPrecision", keep_low_precision_grads=(policy.keep_low_precision_grads, False))
    return Precision(
        policy.param_dtype,
        policy.reduce_dtype,
        keep_fp32=tuple(policy._module_classes_to_ignore) if wraps else None,
        cast_inputs=casts or (policy.cast_root_forward_inputs and "model"),
    )


def init_of(param_init_fn: Any, model: nn.Module) -> Init | None:
    """It as an `init`, which gets modules that are allocated. What it allocates in modules within
    is dropped: they are filled by calls of their own."""
    if param_init_fn is None:
        return None
    if not callable(param_init_fn):
        raise UsageError(
            f"FullyShardedDataParallel: param_init_fn={param_init_fn!r}; allowed: a function of a "
            "module, or None"
        )
    unmade = {t for t in (*model.parameters(), *model.buffers()) if t.is_meta}

    def init(module: nn.Module) -> None:
        found = [
            (m, name, t)
            for m in module.modules()
            for name, t in (*m._parameters.items(), *m._buffers.items())
            if t in unmade
        ]
        for m, name, t in found:
            setattr(m, name, _on_meta(t))
        param_init_fn(module)
        for m, name, t in found:
            made = getattr(m, name)
            setattr(m, name, t)
            if m is not module:
                continue
            if made.is_meta:
                raise UsageError(
                    f"param_init_fn left {name} of a {type(module).__name__} on the meta device; "
                    "it is to allocate, as by module.to_empty(device=..., recurse=False), and fill"
                )
            t.copy_(made)

    return init


def _on_meta(t: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(t, device="meta")
    return nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made


def cast_buffers(
    module: nn.Module,
    dtype: torch.dtype | None,
    precision: Precision,
    apart: Iterable[nn.Module] = (),
) -> dict[str, torch.dtype]:
    """Cast floating-point buffers, except in modules `apart`, and in those that compute in float32.
    Returns the former dtypes of those that changed, by name."""
    keeps, _ = kept(of_modules(module, {module: precision}))
    others = {b for m in (*keeps, *apart) for b in m.buffers()}
    changed = {
        name: b
        for name, b in module.named_buffers(remove_duplicate=False)
        if dtype not in (None, b.dtype) and b.is_floating_point() and b not in others
    }
    before = {name: b.dtype for name, b in changed.items()}
    for b in changed.values():
        b.data = b.to(dtype)
    return before
