"""`initialize` with DeepSpeed's configuration keys. Sizes are in elements, as there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ringdp.comm import Communicator, communicator_of
from ringdp.errors import UsageError
from ringdp.parallel.engine import Engine
from ringdp.parallel.entry import shard
from ringdp.parallel.fronts.trainer import Batches, Trainer
from ringdp.parallel.offload import Offload
from ringdp.parallel.precision import Precision
from ringdp.parallel.scaler import LossScaler
from ringdp.parallel.units import UnitRule


class Key(NamedTuple):
    """What may be said: true or false, a device, or a number, whole or not, of at least `least`
    and less than `below`."""

    default: Any
    kind: Literal["bool", "device", "whole", "number"]
    least: float = 0
    below: float = math.inf


_OFFLOAD: dict[str, Any] = {"device": Key("none", "device"), "pin_memory": Key(True, "bool")}

# Every key that is implemented; a dict is a section.
KEYS: dict[str, Any] = {
    "train_batch_size": Key(None, "whole", 1),
    "train_micro_batch_size_per_gpu": Key(None, "whole", 1),
    "gradient_accumulation_steps": Key(None, "whole", 1),
    "gradient_clipping": Key(0.0, "number"),
    "fp16": {
        "enabled": Key(False, "bool"),
        "loss_scale": Key(0, "number"),  # 0: dynamic
        "initial_scale_power": Key(16, "whole", below=128),  # what float32 holds
        "loss_scale_window": Key(1000, "whole", 1),
        "min_loss_scale": Key(1, "number"),
    },
    "bf16": {"enabled": Key(False, "bool")},
    "zero_optimization": {
        "stage": Key(0, "whole"),
        "overlap_comm": Key(True, "bool"),
        "contiguous_gradients": Key(True, "bool"),
        "reduce_bucket_size": Key(None, "whole", 1),
        "allgather_bucket_size": Key(None, "whole", 1),
        "offload_optimizer": _OFFLOAD,
        "offload_param": _OFFLOAD,
        "stage3_prefetch_bucket_size": Key(None, "whole"),
        "stage3_param_persistence_threshold": Key(0, "whole"),
        "stage3_max_live_parameters": Key(None, "whole"),
    },
}


def initialize(
    *,
    model: nn.Module,
    config: Mapping[str, Any],
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    unit: UnitRule | None = None,
    comm: Communicator | None = None,
) -> tuple[Trainer, torch.optim.Optimizer, None, None]:
    """Shard the model as the config says. Collective. DeepSpeed's four values, the last two None.

    optimizer: makes one of the parameters, as a class does. unit: as for `shard`; else the bucket
    sizes bound the units, which are both gathered and reduced in one piece. Raises UsageError for
    a key that is not implemented: KEYS has those that are.
    """
    comm = communicator_of(comm, model.parameters())
    said = _filled("config", config, KEYS)
    zero, half, brain = said["zero_optimization"], said["fp16"], said["bf16"]
    if half["enabled"] and brain["enabled"]:
        raise UsageError("config: fp16 and bf16 are both enabled; allowed: one of them")
    if not zero["contiguous_gradients"]:
        raise UsageError("config: contiguous_gradients=false is not implemented: they always are")
    param = torch.float16 if half["enabled"] else torch.bfloat16 if brain["enabled"] else None
    itemsize = (param or next(model.parameters(), torch.empty(0)).dtype).itemsize
    sizes = [s for s in (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) if s]
    prefetch = zero["stage3_prefetch_bucket_size"]
    offloads = [_offload(zero, key) for key in ("offload_param", "offload_optimizer")]
    batches = _batches(said, comm.size)
    if not callable(optimizer):
        raise UsageError(
            f"initialize(optimizer={optimizer!r}): allowed: what makes one of the parameters, such "
            "as its class; they are other ones once the model is sharded"
        )
    engine = shard(
        model,
        stage=zero["stage"],
        unit=unit if unit is not None or not sizes else min(sizes),
        precision=Precision(param),
        offload=Offload(*offloads),
        prefetch_bytes=None if prefetch is None else prefetch * itemsize,
        persist_below=zero["stage3_param_persistence_threshold"],
        overlap=zero["overlap_comm"],
        comm=comm,
    )
    try:
        if unit is not None and sizes:
            _check_buckets(engine, min(sizes))
        if engine.stage.number == 3 and (live := zero["stage3_max_live_parameters"]) is not None:
            _bound(engine, live * itemsize)
        scaler = _scaler(engine, half)
    except UsageError:
        with engine.full_parameters():
            engine.close()  # the model is as it was
        raise
    made = optimizer(model.parameters())
    trainer = Trainer(model, engine, made, batches, float(said["gradient_clipping"]), scaler)
    return trainer, made, None, None


def _filled(where: str, given: object, known: dict[str, Any]) -> dict[str, Any]:
    """The values given, else (and for null) the defaults; UsageError for what is not allowed."""
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} is {given!r}; allowed: a section with {', '.join(known)}")
    if unknown := [str(key) for key in given if key not in known]:
        raise UsageError(
            f"{where}: {', '.join(unknown)} is not implemented; there are {', '.join(known)}"
        )
    out: dict[str, Any] = {}
    for name, key in known.items():
        value, place = given.get(name), f"{where}.{name}"
        if isinstance(key, dict):
            out[name] = _filled(place, {} if value is None else value, key)
        else:
            out[name] = key.default if value is None else _value(place, value, key)
    return out


def _value(where: str, value: Any, key: Key) -> Any:
    if key.kind == "device":
        if value not in ("none", "cpu"):
            raise UsageError(f"{where} is {value!r}; allowed: 'none', 'cpu'")
        return value
    if key.kind == "bool":
        if not isinstance(value, bool):
            raise UsageError(f"{where} is {value!r}; allowed: true, false")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not key.least <= value < key.below or (key.kind == "whole" and value % 1):
        what = "a whole number" if key.kind == "whole" else "a number"
        most = f" and below {key.below:g}" if key.below < math.inf else ""
        raise UsageError(f"{where} is {value!r}; allowed: {what} of at least {key.least:g}{most}")
    return int(value) if key.kind == "whole" else value


def _scaler(engine: Engine, half: dict[str, Any]) -> LossScaler:
    dynamic = half["enabled"] and half["loss_scale"] == 0
    fixed = half["loss_scale"] if half["enabled"] and not dynamic else 1
    return LossScaler(
        engine,
        scale=2.0 ** half["initial_scale_power"] if dynamic else float(fixed),
        growth=2.0 if dynamic else 1.0,
        backoff=0.5 if dynamic else 1.0,
        interval=half["loss_scale_window"],
        minimum=float(half["min_loss_scale"]),
    )


def _offload(zero: dict[str, Any], key: str) -> bool:
    said = zero[key]
    if not said["pin_memory"]:
        raise UsageError(f"config: {key}.pin_memory=false is not implemented: it is pinned")
    return bool(said["device"] == "cpu")


def _batches(said: dict[str, Any], ranks: int) -> Batches:
    """Any two of the three sizes give the third; DeepSpeed's rules."""
    total, micro, steps = (
        said[key]
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    )
    if total is None and micro is None:
        raise UsageError("config: give train_batch_size or train_micro_batch_size_per_gpu")
    if micro is None:
        steps = steps or 1
        micro = total // (steps * ranks)
    elif steps is None:
        steps = 1 if total is None else total // (micro * ranks)
    if total is not None and micro * steps * ranks != total:
        raise UsageError(
            f"config: train_batch_size {total} is not micro batch {micro} x accumulation {steps} x "
            f"{ranks} ranks"
        )
    return Batches(micro, steps)


def _check_buckets(engine: Engine, most: int) -> None:
    """A unit is reduced and gathered in one piece, which the bucket sizes bound."""
    for unit in engine.plan[len(engine.roots) :]:
        if unit.elements > most:
            raise UsageError(
                f"config: a bucket size of {most:,} is asked for; unit {unit.name!r}"
                f" has {unit.elements:,} elements. Allow as many, or choose smaller units"
            )


def _bound(engine: Engine, live: int) -> None:
    """Look ahead no further than `live` bytes of gathered units allow."""
    sizes = [sum(engine.units[i].bytes for i in group) for group in engine.groups]
    used = sizes[0] + max(sizes[1:], default=0)
    if used > live:
        raise UsageError(
            f"config: stage3_max_live_parameters allows {live:,} bytes; the root and the largest "
            f"unit are {used:,}. Allow as many, or choose smaller units"
        )
    engine.gathering.limit = min(engine.gathering.limit, live - used)
