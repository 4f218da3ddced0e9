"""`initialize` with DeepSpeed's configuration keys. Sizes are in elements, as there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringdp.comm import Communicator, world
from ringdp.errors import UsageError
from ringdp.parallel.clip import clip_grad_norm_
from ringdp.parallel.engine import Engine
from ringdp.parallel.entry import shard
from ringdp.parallel.offload import Offload
from ringdp.parallel.precision import Precision
from ringdp.parallel.scaler import LossScaler
from ringdp.parallel.units import UnitRule

# Every key that is implemented, with its default; a dict is a section.
KEYS: dict[str, Any] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "gradient_clipping": 0.0,
    "fp16": {
        "enabled": False,
        "loss_scale": 0,  # 0: dynamic
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 0,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": None,
        "allgather_bucket_size": None,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "stage3_prefetch_bucket_size": None,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": None,
    },
}


@dataclass(frozen=True)
class Batches:
    """train_batch_size = micro * accumulation * ranks."""

    micro: int
    accumulation: int


class Trainer:
    """What `initialize` returns first: call it, then backward(loss), then step()."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        clipping: float,
        scaler: LossScaler,
    ) -> None:
        self.module, self.engine, self.optimizer = model, engine, optimizer
        self.batches, self.clipping, self.scaler = batches, clipping, scaler
        self.micro_steps = 0  # backwards so far

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Gradients of loss / gradient_accumulation_steps, reduced and added up."""
        self.micro_steps += 1
        scaled = self.scaler.scale(loss / self.batches.accumulation)
        scaled.backward()  # type: ignore[no-untyped-call]

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_steps % self.batches.accumulation == 0

    def step(self) -> None:
        """At the end of an accumulation: clip, step on all ranks or none, clear the gradients."""
        if not self.is_gradient_accumulation_boundary():
            return
        if self.scaler.unscale_() and self.clipping > 0:
            clip_grad_norm_(self.engine, self.clipping)
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()


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
    comm = comm or world()
    said = _filled("config", config, KEYS)
    zero, half, brain = said["zero_optimization"], said["fp16"], said["bf16"]
    if half["enabled"] and brain["enabled"]:
        raise UsageError("config: fp16 and bf16 are both enabled; allowed: one of them")
    if not zero["contiguous_gradients"]:
        raise UsageError("config: contiguous_gradients=false is not implemented: they always are")
    param = torch.float16 if half["enabled"] else torch.bfloat16 if brain["enabled"] else None
    itemsize = (param or next(model.parameters()).dtype).itemsize
    sizes = [s for s in (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) if s]
    prefetch = zero["stage3_prefetch_bucket_size"]
    offloads = [_offload(zero, key) for key in ("offload_param", "offload_optimizer")]
    batches = _batches(said, comm.size)
    if optimizer is None:
        raise UsageError("initialize: pass optimizer=, which makes one of the parameters")
    engine = shard(
        model,
        stage=zero["stage"],
        unit=unit if unit is not None or not sizes else int(min(sizes)),
        precision=Precision(param),
        offload=Offload(*offloads),
        prefetch_bytes=None if prefetch is None else int(prefetch) * itemsize,
        persist_below=int(zero["stage3_param_persistence_threshold"]),
        overlap=bool(zero["overlap_comm"]),
        comm=comm,
    )
    if (live := zero["stage3_max_live_parameters"]) is not None:
        _bound(engine, int(live) * itemsize)
    dynamic = half["enabled"] and half["loss_scale"] == 0
    fixed = half["loss_scale"] if half["enabled"] and not dynamic else 1
    scaler = LossScaler(
        engine,
        scale=2.0 ** half["initial_scale_power"] if dynamic else float(fixed),
        growth=2.0 if dynamic else 1.0,
        backoff=0.5 if dynamic else 1.0,
        interval=int(half["loss_scale_window"]),
        minimum=float(half["min_loss_scale"]),
    )
    made = optimizer(model.parameters())
    trainer = Trainer(model, engine, made, batches, float(said["gradient_clipping"]), scaler)
    return trainer, made, None, None


def _filled(where: str, given: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The values given, else the defaults; UsageError for a key that is not known."""
    if unknown := sorted(set(given) - set(known)):
        raise UsageError(
            f"{where}: {', '.join(unknown)} is not implemented; there are {', '.join(known)}"
        )
    return {
        key: _filled(f"{where}.{key}", given.get(key) or {}, default)
        if isinstance(default, dict)
        else given.get(key, default)
        for key, default in known.items()
    }


def _offload(zero: dict[str, Any], key: str) -> bool:
    said = zero[key]
    if said["device"] not in ("none", "cpu"):
        raise UsageError(f"config: {key}.device={said['device']!r}; allowed: 'none', 'cpu'")
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
