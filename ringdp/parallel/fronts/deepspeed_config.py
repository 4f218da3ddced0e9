"""DeepSpeed's config: the implemented keys, their checks and meanings. Sizes are in elements."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch.optim import Optimizer, lr_scheduler

from ringdp.errors import UsageError
from ringdp.parallel.fronts.deepspeed_schedulers import SCHEDULERS
from ringdp.parallel.optimizer.adamw import AdamW

Config = Mapping[str, Any] | str | os.PathLike[str]


class Key(NamedTuple):
    """A key's default and the kind of its values.

    "whole" and "number" are numbers of at least `least` and below `below`. "only": the default is
    the only value allowed, since that is what is done. "off": a section that is not enabled.
    "unused": any value.
    """

    default: Any
    kind: Literal[
        "bool", "device", "dtype", "optimizer", "scheduler", "options", "whole", "number", "only",
        "off", "unused",
    ]  # fmt: skip
    least: float = 0
    below: float = math.inf


def _only(default: Any, *names: str) -> dict[str, Key]:
    return dict.fromkeys(names, Key(default, "only"))


_OFFLOAD: dict[str, Any] = {
    "device": Key("none", "device"),
    "pin_memory": Key(True, "bool"),
    **_only(1.0, "ratio"),
    **dict.fromkeys(  # of the device "nvme"
        (
            "buffer_count", "buffer_size", "fast_init", "max_in_cpu", "nvme_path", "pipeline_read",
            "pipeline_write",
        ),
        Key(None, "unused"),
    ),
}  # fmt: skip
_OFF = (
    "amp", "autotuning", "comet", "comms_logger", "compile", "csv_monitor", "curriculum_learning",
    "data_efficiency", "eigenvalue", "elasticity", "flops_profiler", "hybrid_engine",
    "monitor_config", "progressive_layer_drop", "quantize_training", "tensorboard",
    "torch_autocast", "wandb",
)  # fmt: skip

# All implemented keys; a dict is a section.
KEYS: dict[str, Any] = {
    "train_batch_size": Key(None, "whole", 1),
    "train_micro_batch_size_per_gpu": Key(None, "whole", 1),
    "gradient_accumulation_steps": Key(None, "whole", 1),
    "gradient_clipping": Key(1.0, "number"),  # 0: none
    "communication_data_type": Key(None, "dtype"),  # of gradients
    "steps_per_print": Key(None, "whole", 1),
    # Any optimizer is taken that steps slices or whole parameters.
    "zero_allow_untested_optimizer": Key(True, "bool"),
    "zero_force_ds_cpu_optimizer": Key(False, "bool"),
    **_only(
        False, "prescale_gradients", "wall_clock_breakdown", "memory_breakdown", "dump_state",
        "sparse_gradients", "dataloader_drop_last",
    ),
    **_only(1.0, "gradient_predivide_factor"),
    "data_types": _only("fp32", "grad_accum_dtype"),
    "aio": Key({}, "unused"),  # of the device "nvme"
    "optimizer": {
        "type": Key(None, "optimizer"),
        "params": Key({}, "options"),
        **_only(True, "adam_w_mode"),
        **_only(False, "legacy_fusion"),
    },
    "scheduler": {"type": Key(None, "scheduler"), "params": Key({}, "options")},
    "fp16": {
        "enabled": Key(False, "bool"),
        "loss_scale": Key(0, "number"),  # 0: dynamic
        "initial_scale_power": Key(16, "whole", below=128),  # what float32 holds
        "loss_scale_window": Key(1000, "whole", 1),
        "hysteresis": Key(2, "whole", 1),
        "min_loss_scale": Key(1, "number"),
        **_only(False, "auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"),
    },
    "bf16": {
        "enabled": Key(False, "bool"),
        "immediate_grad_update": Key(True, "bool"),  # always, as a bucket is reduced
        **_only(True, "check_grad_overflow"),
        **_only(False, "auto_cast", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
    },
    "zero_optimization": {
        "stage": Key(0, "whole"),
        "overlap_comm": Key(True, "bool"),
        "reduce_bucket_size": Key(None, "whole", 1),
        "allgather_bucket_size": Key(None, "whole", 1),
        "offload_optimizer": _OFFLOAD,
        "offload_param": _OFFLOAD,
        "stage3_prefetch_bucket_size": Key(None, "whole"),
        "stage3_param_persistence_threshold": Key(0, "whole"),
        "stage3_max_live_parameters": Key(None, "whole"),
        **dict.fromkeys(  # of save_16bit_model
            (
                "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
            ),
            Key(False, "bool"),
        ),
        "memory_efficient_linear": Key(False, "bool"),  # torch's linear layers are
        "round_robin_gradients": Key(True, "bool"),  # every rank copies its own shard
        **_only(
            True, "allgather_partitions", "compute_grad_norm", "contiguous_gradients",
            "ignore_unused_parameters", "load_from_fp32_weights", "reduce_scatter",
            "use_multi_rank_bucket_allreduce",
        ),
        **_only(
            False, "cpu_offload", "elastic_checkpoint", "legacy_stage1", "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights", "zero_quantized_weights",
        ),
        "zero_hpz_partition_size": Key(1, "whole", 1),  # 1: all ranks
        "mics_shard_size": Key(-1, "whole", -1),  # -1: all ranks
        **_only(False, "mics_hierarchical_params_gather"),
        "sub_group_size": Key(1e9, "whole", 1e9),
        "stage3_max_reuse_distance": Key(0, "whole"),  # 0: a unit is freed after every use
    },
    "activation_checkpointing": {
        **_only(
            False, "contiguous_memory_optimization", "cpu_checkpointing", "partition_activations",
            "profile", "synchronize_checkpoint_boundary",
        ),
        **_only(None, "number_checkpoints"),
    },
    **dict.fromkeys(_OFF, Key({}, "off")),
}  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ADAMS = ("adam", "adamw")  # in any case
# Options of optimizers and schedulers that ask for what is done.
USUAL = {"bias_correction": True, "amsgrad": False, "last_batch_iteration": -1}
# Keys whose value may be "auto", as in configs for Hugging Face's Trainer: it means null. For other
# keys it is an error that asks for a value.
AUTO = frozenset((
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_max_live_parameters", "warmup_max_lr",
    "warmup_min_lr",
))  # fmt: skip


class Batches(NamedTuple):
    """train_batch_size = micro * accumulation * ranks."""

    micro: int
    accumulation: int


def read(*given: Config | None) -> dict[str, Any]:
    """The values of all KEYS in the one config given, a mapping or the path of a JSON file; missing
    and null values are defaults. Raises UsageError for a key or value that is not allowed."""
    configs = [config for config in given if config is not None]
    if len(configs) != 1:
        raise UsageError(
            f"initialize was given {len(configs)} configs; allowed: one, as config or as "
            "args.deepspeed_config"
        )
    config: Any = configs[0]
    if isinstance(config, str | os.PathLike):
        try:
            config = json.loads(Path(config).read_bytes())
        except (OSError, ValueError) as e:  # no JSON, or not even UTF-8
            raise UsageError(f"config {os.fspath(config)!r} cannot be read as JSON: {e}") from e
    if isinstance(config, Mapping) and "bfloat16" in config:  # the old name
        config = {"bf16": config["bfloat16"]} | {k: v for k, v in config.items() if k != "bfloat16"}
    return _filled("config", config, KEYS)


def batches(settings: dict[str, Any], ranks: int) -> Batches:
    """Any two of the three sizes determine the third, by DeepSpeed's rules."""
    total, micro = settings["train_batch_size"], settings["train_micro_batch_size_per_gpu"]
    steps = settings["gradient_accumulation_steps"]
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


def optimizer(settings: dict[str, Any]) -> Callable[[Any], Optimizer] | None:
    """A function that makes the optimizer that the config names, if any. DeepSpeed's Adam is AdamW
    unless adam_w_mode is false; both have weight_decay 0 by default."""
    name, options = settings["optimizer"]["type"], dict(settings["optimizer"]["params"])
    if name is None:
        return None
    made_by: Any = getattr(torch.optim, name, None)
    if name.lower() in ADAMS:
        decays = options.pop("adam_w_mode", True) or name.lower() == "adamw"
        made_by = torch.optim.AdamW if decays else torch.optim.Adam
        if not options.pop("torch_adam", False):
            made_by = AdamW if decays else torch.optim.Adam
            options.setdefault("weight_decay", 0.0)
    return partial(_made, "optimizer", name, made_by, options)


def scheduler(settings: dict[str, Any]) -> Callable[[Optimizer], lr_scheduler.LRScheduler] | None:
    """A function that makes the scheduler that the config names, if any."""
    name, options = settings["scheduler"]["type"], settings["scheduler"]["params"]
    if name is None:
        return None
    made_by = SCHEDULERS.get(name) or getattr(lr_scheduler, name)
    return partial(_made, "scheduler", name, made_by, options)


def _made(section: str, name: str, made_by: Any, options: dict[str, Any], of: Any) -> Any:
    try:
        return made_by(of, **options)
    except (TypeError, ValueError) as e:
        raise UsageError(f"config.{section}.params {options} do not fit {name}: {e}") from e


def _filled(where: str, given: object, known: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} is {given!r}; allowed: a section with {', '.join(known)}")
    if unknown := [str(key) for key in given if key not in known]:
        raise UsageError(
            f"{where}: {', '.join(unknown)} is not implemented; there are {', '.join(known)}"
        )
    out: dict[str, Any] = {}
    for name, key in known.items():
        value, place = _known(name, given.get(name)), f"{where}.{name}"
        if isinstance(key, dict):
            out[name] = _filled(place, {} if value is None else value, key)
        else:
            out[name] = key.default if value is None else _value(place, value, key)
    return out


def _value(where: str, value: Any, key: Key) -> Any:
    off = isinstance(value, Mapping) and value.get("enabled", False) is False
    number = isinstance(value, int | float) and not isinstance(value, bool)
    number = number and key.least <= value < key.below
    bounds = f"of at least {key.least:g}"
    bounds += f" and below {key.below:g}" if key.below < math.inf else ""
    fits, allowed = {
        "device": (value in ("none", "cpu"), "'none', 'cpu'"),
        "dtype": (value in [*DTYPES], ", ".join(map(repr, DTYPES))),
        "bool": (isinstance(value, bool), "true, false"),
        "optimizer": (
            str(value).lower() in ADAMS or _has(torch.optim, value, Optimizer),
            "Adam, AdamW, and torch.optim's names",
        ),
        "scheduler": (
            str(value) in SCHEDULERS or _has(lr_scheduler, value, lr_scheduler.LRScheduler),
            f"{', '.join(SCHEDULERS)}, and torch.optim.lr_scheduler's names",
        ),
        "options": (isinstance(value, Mapping), "keyword arguments"),
        "only": (_is(value, key.default), json.dumps(key.default)),
        "off": (off, "a section that does not say that it is enabled"),
        "unused": (True, ""),
        "number": (number, f"a number {bounds}"),
        "whole": (number and value % 1 == 0, f"a whole number {bounds}"),
    }[key.kind]
    if not fits:
        raise UsageError(f"{where} is {value!r}; allowed: {allowed}")
    if key.kind == "options":
        value = {k: _known(k, v) for k, v in value.items() if not (k in USUAL and _is(v, USUAL[k]))}
        if unknown := [name for name, option in value.items() if _is(option, "auto")]:
            raise UsageError(f"{where}: {', '.join(unknown)} is 'auto'; allowed: its value")
    return int(value) if key.kind == "whole" else value


def _known(name: str, value: Any) -> Any:
    return None if name in AUTO and _is(value, "auto") else value


def _is(value: object, default: object) -> bool:
    """Equality by which 1 is not true."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _has(module: ModuleType, name: object, kind: type) -> bool:
    """Whether the module has a public class of that name and kind, other than the base class."""
    found = getattr(module, str(name), kind)
    named = found is not kind and not str(name).startswith("_")
    return named and isinstance(found, type) and issubclass(found, kind)
