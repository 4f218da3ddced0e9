"""The engine that `initialize` returns, with the methods of DeepSpeed's."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ringdp.errors import CheckpointError, ModelError, UsageError
from ringdp.parallel.checkpoint.index import replace, sync_directory
from ringdp.parallel.checkpoint.load import load
from ringdp.parallel.checkpoint.save import save
from ringdp.parallel.checkpoint.together import together
from ringdp.parallel.engine import Engine
from ringdp.parallel.fronts.deepspeed_config import Batches
from ringdp.parallel.optimizer.clip import clip_grad_norm_
from ringdp.parallel.optimizer.scaler import LossScaler
from ringdp.parallel.refuse import MissingAttribute, refuse

# Methods of DeepSpeed's engine that are not implemented.
ABSENT = (
    "allreduce_gradients", "deepspeed_io", "destroy", "eval_batch", "load_universal_checkpoint",
    "no_sync", "offload_states", "reload_states", "save_16bit_model", "save_fp16_model",
    "set_gradient_accumulation_boundary", "set_lr", "set_train_batch_size",
    "set_train_micro_batch_size", "train_batch",
)  # fmt: skip


class Scheduler(Protocol):
    """A learning rate scheduler, such as torch's."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class DeepSpeedEngine:
    """For each micro batch: call it, then backward(loss), then step()."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        batches: Batches,
        scaler: LossScaler,
        training_dataloader: DataLoader[Any] | None,
        lr_scheduler: Scheduler | None,
    ) -> None:
        """`settings`: the config's values."""
        self.module, self.engine, self.optimizer = engine.model, engine, optimizer
        self.settings, self.batches, self.scaler = settings, batches, scaler
        self.training_dataloader, self.lr_scheduler = training_dataloader, lr_scheduler
        self.micro_steps = 0  # calls of step()
        self.global_steps = 0  # the optimizer's steps, including those skipped on overflow
        self._norm: float | None = None
        self._seen = 0  # `handed_out` at the last check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model that has this as an attribute has None there."""
        if id(self.module) not in memo:
            raise UsageError(
                "the engine of ringdp.initialize is copied; the copy could reach no other rank. "
                "Copy its .module, within .engine.full_parameters(), and initialize that"
            )

    forward = __call__  # the module's own would run without the engine's hooks

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module, such as train() and eval()."""
        if name == "module":  # not set yet in a copy
            raise AttributeError(name)
        if name in ABSENT and not hasattr(self.module, name):
            raise MissingAttribute(
                "initialize", name, ".optimizer, .engine (no_sync(), close()) or ringdp.export"
            )
        return getattr(self.module, name)

    def backward(self, loss: Tensor) -> Tensor:
        """Backward of loss / gradient_accumulation_steps, which it returns; gradients are reduced
        and accumulated."""
        self._check_backwards()
        loss = loss / self.batches.accumulation
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._seen = self.engine.reducing.handed_out
        return loss

    def _check_backwards(self) -> None:
        """Raise UsageError if there are gradients, a backward since the last check was not of this
        class's method, and that would have changed the loss."""
        seen, self._seen = self._seen, self.engine.reducing.handed_out
        if self.batches.accumulation == 1 and self.scaler.current == 1:
            return
        if seen != self._seen and any(p.grad is not None for p in self.module.parameters()):
            raise UsageError(
                "loss.backward() neither divides the loss by gradient_accumulation_steps nor "
                "multiplies it by the loss scale; call the engine's backward(loss)"
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() steps the optimizer."""
        return (self.micro_steps + 1) % self.batches.accumulation == 0

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Call it after every backward. At the end of an accumulation it clips, steps the optimizer
        on all ranks or none, then the scheduler with `lr_kwargs`, and clears the gradients. Raises
        ModelError if they overflowed at fp16.min_loss_scale, unless the scale is fixed."""
        self._check_backwards()
        last = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not last:
            return
        stepped = {p for group in self.optimizer.param_groups for p in group["params"]}
        halves = self.fp16_enabled() or self.bfloat16_enabled()
        for name, p in self.module.named_parameters():
            if p not in stepped:
                p.grad = None  # it counts neither as an overflow nor in the norm
            elif halves and p.requires_grad and p.dtype.itemsize == 2:
                raise UsageError(
                    f"parameter {name} was frozen at initialize, which has kept it in {p.dtype}; "
                    "to step it in float32, as the others, unfreeze it before, and freeze it after"
                )
        scaler, scale = self.scaler, self.scaler.current
        if scaler.unscale_():
            self._norm = clip_grad_norm_(self.engine, self.gradient_clipping() or math.inf)
        finite = scaler.step(self.optimizer)
        if finite and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.optimizer.zero_grad()
        self.global_steps += 1
        every = self.settings["steps_per_print"]
        if self.global_rank == 0 and every and self.global_steps % every == 0:
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}")
        if not (finite or scaler.left) and scaler.backoff < 1 and scale == scaler.minimum:
            raise ModelError(
                f"step {self.global_steps}: gradients overflowed at a loss scale of {scale}, the "
                "least that fp16.min_loss_scale allows; look for inf or NaN in the loss, allow a "
                "lower scale, or use bf16"
            )

    # ---- read

    @property
    def global_rank(self) -> int:
        return self.engine.comm.rank

    @property
    def local_rank(self) -> int:
        """The rank on its host, from torchrun's LOCAL_RANK."""
        return dist.get_node_local_rank(0 if self.world_size == 1 else None)

    @property
    def world_size(self) -> int:
        return self.engine.comm.size

    def fp16_enabled(self) -> bool:
        return bool(self.settings["fp16"]["enabled"])

    def bfloat16_enabled(self) -> bool:
        return bool(self.settings["bf16"]["enabled"])

    def train_batch_size(self) -> int:
        return self.batches.micro * self.batches.accumulation * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.batches.micro

    def gradient_accumulation_steps(self) -> int:
        return self.batches.accumulation

    def gradient_clipping(self) -> float:
        return float(self.settings["gradient_clipping"])

    def zero_optimization_stage(self) -> int:
        return self.engine.stage.number

    def get_lr(self) -> list[Any]:
        """The learning rate of every parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients, before they were clipped; None before it. A step
        that overflowed does not change it."""
        return self._norm

    @property
    def skipped_steps(self) -> int:
        return self.scaler.skipped

    @property
    def device(self) -> torch.device:
        return self.engine.device

    # ---- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything to save_dir/tag, by default global_stepN, and then the tag to
        save_dir/latest if `save_latest`. Gradients accumulated so far are left out. client_state
        and the scheduler's state must be JSON. Collective; see `ringdp.save`."""
        refuse("save_checkpoint", exclude_frozen_parameters=(exclude_frozen_parameters, False))
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        extra = {
            "global_steps": self.global_steps,
            "scaler": self.scaler.state_dict(),
            "lr_scheduler": self.lr_scheduler and _as_json(self.lr_scheduler.state_dict()),
            "client_state": client_state or {},
        }
        save(Path(save_dir) / tag, self.engine, self.optimizer, extra=extra)
        with together(self.engine.comm, f"{tag} is written, but not named as the latest"):
            if save_latest and self.global_rank == 0:
                replace(Path(save_dir) / "latest", tag)
                sync_directory(Path(save_dir))
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load load_dir/tag, by default the latest. Returns its path and client_state. Collective.

        Without load_optimizer_states the optimizer's options and the loss scale stay too; a fixed
        loss scale always stays. Gradients accumulated so far are dropped. Raises CheckpointError,
        as `ringdp.load` does, also if there is no checkpoint."""
        refuse(
            "load_checkpoint",
            load_module_strict=(load_module_strict, True),
            load_module_only=(load_module_only, False),
            custom_load_fn=(custom_load_fn, None),
        )
        with together(self.engine.comm, "nothing was loaded"):
            if tag is None:
                tag = (Path(load_dir) / "latest").read_text(encoding="utf-8").strip()
        path = Path(load_dir) / str(tag)
        extra = load(path, self.engine, self.optimizer if load_optimizer_states else None)
        if "global_steps" not in extra:
            raise CheckpointError(f"{path} was loaded, but is not of save_checkpoint: no steps")
        self.global_steps = extra["global_steps"]
        self.micro_steps = self.global_steps * self.batches.accumulation
        self.optimizer.zero_grad()
        if load_optimizer_states:
            fixed = {"scale": self.scaler.current} if self.scaler.backoff == 1 else {}
            self.scaler.load_state_dict(extra["scaler"] | fixed)
        scheduler = self.lr_scheduler if load_lr_scheduler_states else None
        if scheduler is not None and (saved := extra.get("lr_scheduler")):
            scheduler.load_state_dict(_of_json(saved, scheduler.state_dict()))
        return str(path), extra["client_state"]


def _as_json(state: Any) -> Any:
    """A scheduler's state. In torch's MultiStepLR, also if within a SequentialLR, the milestones
    are a Counter; they become a list."""
    if isinstance(state, Counter):
        return [*state.elements()]
    if isinstance(state, dict):
        return {k: _as_json(v) for k, v in state.items()}
    return [*map(_as_json, state)] if isinstance(state, list | tuple) else state


def _of_json(saved: Any, here: Any) -> Any:
    """The inverse, with Counters where the scheduler's state has some now."""
    if isinstance(here, Counter):
        return Counter(saved)
    if isinstance(here, dict) and isinstance(saved, dict):
        return {k: _of_json(v, here.get(k)) for k, v in saved.items()}
    if isinstance(here, list) and isinstance(saved, list) and len(here) == len(saved):
        return [*map(_of_json, saved, here)]
    return saved
