"""`initialize`, with DeepSpeed's arguments and config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel.engine import Engine
from ringdp.parallel.entry import shard
from ringdp.parallel.fronts import deepspeed_config as configs
from ringdp.parallel.fronts.deepspeed_engine import DeepSpeedEngine, Scheduler
from ringdp.parallel.fronts.fsdp_arguments import cast_buffers
from ringdp.parallel.mesh import move_to_ranks
from ringdp.parallel.offload import Offload
from ringdp.parallel.optimizer.scaler import LossScaler
from ringdp.parallel.precision import ModuleRule, Precision
from ringdp.parallel.refuse import checked_module, refuse
from ringdp.parallel.units import find_units

PORT = 29500  # DeepSpeed's default


def initialize(
    args: object = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Scheduler | Callable[[Optimizer], Scheduler] | None = None,
    distributed_port: int = PORT,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: configs.Config | None = None,
    mesh_param: object = None,
    config_params: configs.Config | None = None,
    *,
    unit: ModuleRule | None = None,
    comm: Communicator | ProcessGroup | None = None,
) -> tuple[DeepSpeedEngine, Optimizer, DataLoader[Any] | None, Scheduler | None]:
    """Shard the model as the config says. Collective.

    Returns DeepSpeed's four values: engine, optimizer, data loader, learning rate scheduler. With
    fp16 or bf16 the optimizer steps parameters in float32, even of a model that has 16 bits, and
    those of one in float32 unrounded, unlike DeepSpeed's; those that are frozen now keep their
    dtype, and if that has 16 bits, cannot train later. Buffers, such as batch norms', are cast to
    16 bits, as by DeepSpeed.

    config: a mapping, or the path of a JSON file; by default args.deepspeed_config (nothing else of
    args is read). optimizer: a function of the parameters, such as a class, or an optimizer that
    has not stepped; by default the config's. model_parameters: those to step, by default all.
    lr_scheduler: a scheduler, or a function of the optimizer; by default the config's. The engine
    steps it after every step that did not overflow. training_data: loaded in micro batches, with
    collate_fn, each rank its part of every epoch. unit, comm: as for `shard`; by default the bucket
    sizes bound the units, since a unit is gathered and reduced in one piece. Raises UsageError for
    a key or an argument that is not implemented; deepspeed_config.KEYS lists the keys that are.
    """
    refuse(
        "initialize",
        distributed_port=(distributed_port, PORT),
        mpu=(mpu, None),
        dist_init_required=(dist_init_required or None, None),
        mesh_param=(mesh_param, None),
    )
    model = checked_module("initialize", model)
    settings = configs.read(config, config_params, getattr(args, "deepspeed_config", None))
    comm = move_to_ranks(model, comm)
    zero, fp16, bf16 = settings["zero_optimization"], settings["fp16"], settings["bf16"]
    if fp16["enabled"] and bf16["enabled"]:
        raise UsageError("config: fp16 and bf16 are both enabled; allowed: one of them")
    param = torch.float16 if fp16["enabled"] else torch.bfloat16 if bf16["enabled"] else None
    itemsize = (
        param or next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    ).itemsize
    sizes = [s for s in (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) if s]
    prefetch, live = zero["stage3_prefetch_bucket_size"], zero["stage3_max_live_parameters"]
    near = zero["zero_hpz_partition_size"]
    batches = configs.batches(settings, comm.size)
    make: Any = configs.optimizer(settings) if optimizer is None else optimizer
    groups = _groups(model, make, model_parameters)
    if (named := configs.scheduler(settings)) and lr_scheduler is not None:
        raise UsageError("initialize: there is a lr_scheduler and config.scheduler; allowed: one")
    lr_scheduler = named or lr_scheduler
    _check_scheduler(lr_scheduler, optimizer)
    loader = _loader(training_data, batches.micro, collate_fn, comm)
    with _half(model, param) if param else nullcontext():
        engine = shard(
            model,
            stage=zero["stage"],
            unit=unit if unit is not None or not sizes else min(sizes),
            precision=Precision(param, configs.DTYPES.get(settings["communication_data_type"])),
            offload=Offload(
                parameters=zero["offload_param"]["device"] == "cpu",
                optimizer=zero["offload_optimizer"]["device"] == "cpu",
                pin=zero["offload_param"]["pin_memory"] and zero["offload_optimizer"]["pin_memory"],
            ),
            prefetch_bytes=None if prefetch is None else prefetch * itemsize,
            persist_below=zero["stage3_param_persistence_threshold"],
            overlap=zero["overlap_comm"],
            comm=comm,
            shard_size=None if zero["mics_shard_size"] < 0 else zero["mics_shard_size"],
            reshard_size=None if near == 1 else near,
        )
        try:
            if unit is not None and sizes:
                _check_buckets(engine, min(sizes))
            if engine.stage.number == 3 and live is not None:
                _bound(engine, live * itemsize)
            scaler = _scaler(engine, fp16)
            made = make if isinstance(make, Optimizer) else make(groups)
            _check_step(made)
            scheduler = lr_scheduler(made) if callable(lr_scheduler) else lr_scheduler
        except Exception:
            with engine.full_parameters():
                engine.close()  # the model is as it was
            raise
    trainer = DeepSpeedEngine(engine, made, settings, batches, scaler, loader, scheduler)
    return trainer, made, loader, scheduler


@contextmanager
def _half(model: nn.Module, param: torch.dtype) -> Iterator[None]:
    """Widen trained parameters of 16 bits to what the optimizer steps, and narrow buffers to what
    the model computes in. An error undoes both."""
    trained = [p for p in model.parameters() if p.requires_grad]
    halves = {p: p.dtype for p in trained if p.dtype.itemsize == 2}
    if halves:
        find_units(model, None)  # refuses parameters that share memory, as widened ones do not
    buffers = {b: b.data for b in model.buffers()}
    try:
        for p in halves:
            p.data = p.data.float()
        cast_buffers(model, param, Precision())
        yield
    except BaseException:
        for p, dtype in halves.items():
            p.data = p.data.to(dtype)
        for b, data in buffers.items():
            b.data = data
        raise


def _groups(model: nn.Module, optimizer: Any, parameters: Iterable[Any] | None) -> list[Any]:
    """The parameters to step, or groups of them. Raises UsageError unless all are the model's, and
    for an optimizer that cannot step them once they are slices."""
    if isinstance(optimizer, Optimizer):
        if optimizer.state:
            raise UsageError(
                f"initialize: the {type(optimizer).__name__} has state of whole parameters, which "
                "will be slices; allowed: one that has none yet, or its class"
            )
        groups: list[Any] = optimizer.param_groups
    elif callable(optimizer):
        groups = list(model.parameters() if parameters is None else parameters)
        groups = [g | {"params": list(g["params"])} if isinstance(g, dict) else g for g in groups]
    else:
        raise UsageError(
            f"initialize(optimizer={optimizer!r}): allowed: an optimizer, what makes one of the "
            "parameters, such as its class, or None where the config names one"
        )
    owned = {id(p) for p in model.parameters()}
    for group in groups:
        for p in group["params"] if isinstance(group, dict) else [group]:
            if id(p) not in owned:
                raise UsageError(
                    f"initialize: the optimizer is to step a {type(p).__name__} that is not one of "
                    "the model's parameters; allowed: these, or dicts of them as torch.optim takes"
                )
    return groups


def _check_step(optimizer: Optimizer) -> None:
    """Raise UsageError if its step needs a closure, as LBFGS's: the engine's takes none."""
    kind = type(optimizer)
    try:
        inspect.signature(kind.step).bind(optimizer)
    except TypeError as e:
        raise UsageError(
            f"initialize: step of {kind.__name__} needs an argument ({e}), and the engine's step() "
            "calls it without any; allowed: optimizers that step so. ringdp.shard(stage=0) leaves "
            "the calls of any optimizer to you"
        ) from None


def _check_scheduler(scheduler: Any, optimizer: object) -> None:
    if scheduler is None or callable(scheduler):
        return
    if not hasattr(scheduler, "step"):
        raise UsageError(
            f"initialize(lr_scheduler={scheduler!r}): allowed: a scheduler, or what makes one of "
            "the optimizer"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            "initialize: lr_scheduler is of another optimizer than the one given; allowed: one of "
            "it, or what makes one of the optimizer, as lambda o: LambdaLR(o, ...)"
        )


def _loader(
    data: Any, rows: int, collate: Callable[[list[Any]], Any] | None, comm: Communicator
) -> DataLoader[Any] | None:
    if data is None:
        return None
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(
            f"initialize: training_data is a {type(data).__name__}; allowed: a Dataset with "
            "__getitem__ and __len__, whose rows can be shared out. Load others yourself"
        )
    sampler = DistributedSampler[Any](data, comm.size, comm.rank)
    return DataLoader(data, rows, sampler=sampler, collate_fn=collate)


class DeepSpeedScaler(LossScaler):
    """The first finite step of all, and after an overflow, does not count towards growth."""

    start = -1


def _scaler(engine: Engine, fp16: dict[str, Any]) -> LossScaler:
    fixed = float(fp16["loss_scale"]) if fp16["enabled"] else 1.0
    return DeepSpeedScaler(
        engine,
        scale=fixed or 2.0 ** fp16["initial_scale_power"],
        growth=1.0 if fixed else 2.0,
        backoff=1.0 if fixed else 0.5,
        interval=fp16["loss_scale_window"],
        hysteresis=fp16["hysteresis"],
        minimum=fixed or float(fp16["min_loss_scale"]),
    )


def _check_buckets(engine: Engine, most: int) -> None:
    """Raise UsageError for a unit of more elements than a bucket may have."""
    for plan in (unit.plan for unit in engine.units[len(engine.groups[0]) :]):
        if plan.elements > most:
            raise UsageError(
                f"config: a bucket size of {most:,} is asked for; unit {plan.name!r}"
                f" has {plan.elements:,} elements. Allow as many, or choose smaller units"
            )


def _bound(engine: Engine, live: int) -> None:
    """Limit prefetching so that gathered units have at most `live` bytes."""
    sizes = [sum(engine.units[i].bytes for i in group) for group in engine.groups]
    used = sizes[0] + max(sizes[1:], default=0)
    if used > live:
        raise UsageError(
            f"config: stage3_max_live_parameters allows {live:,} bytes; the root and the largest "
            f"unit are {used:,}. Allow as many, or choose smaller units"
        )
    engine.gathering.limit = min(engine.gathering.limit, live - used)
