"""`initialize` in the ways DeepSpeed's users call it. (Equal losses are tested in test_fronts.)"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ringdp
from ringdp import Communicator, Offload
from ringdp.parallel import fronts
from tests.equal import equal
from tests.parallel.small import WIDTH, batch, net, whole_parameters
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

SIZED: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
LR, BETAS = 0.01, (0.8, 0.9)
NAMED = SIZED | {"optimizer": {"type": "Adam", "params": {"lr": LR, "betas": [*BETAS]}}}
ADAM = partial(ringdp.AdamW, lr=LR, betas=BETAS, weight_decay=0.0)


class Scaled(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def train(engine: Any, *steps: int) -> list[Tensor]:
    for step in steps:
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    return whole_parameters(engine.engine)


@on_ranks(2)
def test_config_and_optimizer_can_be_given_in_every_form(
    comm: Communicator, tmp_path: Path
) -> None:
    file = tmp_path / f"{comm.rank}.json"
    for stage in range(4):
        staged = {"zero_optimization": {"stage": stage}}
        file.write_text(json.dumps(NAMED | staged), encoding="utf-8")
        expected = None
        for given in (
            {"config": SIZED | staged, "optimizer": ADAM},
            {"args": Namespace(local_rank=comm.rank, deepspeed_config=str(file))},
            {"args": Namespace(deepspeed_config=None), "config": file},
            {"config_params": SIZED | staged, "optimizer": "made"},
        ):
            model = net()
            if given.get("optimizer") == "made":
                given["optimizer"] = ADAM(model.parameters())
            engine, optimizer, loader, scheduler = fronts.initialize(
                model=model, model_parameters=model.parameters(), comm=comm, **given
            )
            assert (loader, scheduler) == (None, None)
            assert optimizer is engine.optimizer
            values = train(engine, 0, 1, 2)
            assert equal(values, expected or values)
            expected = values
            engine.engine.close()


@pytest.mark.parametrize(
    ("section", "kind", "decay"),
    [
        ({"type": "AdamW"}, ringdp.AdamW, 0.0),
        ({"type": "adamw", "params": {"adam_w_mode": False}}, ringdp.AdamW, 0.0),
        ({"type": "Adam", "params": {"weight_decay": 0.5}}, ringdp.AdamW, 0.5),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam, 0.0),
        ({"type": "Adam", "params": {"torch_adam": True}}, torch.optim.AdamW, 0.01),
        (
            {"type": "Adam", "adam_w_mode": True, "params": {"bias_correction": True}},
            ringdp.AdamW,
            0.0,
        ),
        ({"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.25}}, torch.optim.SGD, 0.25),
    ],
)
def test_optimizers_of_a_config_are_deepspeeds(section, kind, decay):
    model = net()
    engine, optimizer, *_ = fronts.initialize(
        model=model, model_parameters=[model[1][0].weight], config=SIZED | {"optimizer": section},
        comm=ringdp.init(),
    )  # fmt: skip
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert group["weight_decay"] == decay
    assert [id(p) for p in group["params"]] == [id(model[1][0].weight)]
    engine.engine.close()


# From DeepSpeed's tutorials and others' configs, with the defaults of features that are off.
TUTORIAL: dict[str, Any] = {
    "steps_per_print": 2,
    "data_types": {"grad_accum_dtype": None},
    "aio": {"block_size": 262144, "single_submit": False},
    "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1, "warmup_min_lr": LR}},
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": True,
    "bf16": {"enabled": False, "immediate_grad_update": True},
    "fp16": {
        "enabled": True,
        "auto_cast": False,
        "fp16_master_weights_and_grads": False,
        "loss_scale": 0,
        "initial_scale_power": 15,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "min_loss_scale": 1,
    },
    "zero_optimization": {
        "stage": 3,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
        "elastic_checkpoint": False,
        "load_from_fp32_weights": True,
        "cpu_offload": False,
        "offload_param": None,
        "offload_optimizer": {"device": "cpu", "nvme_path": "/nvme", "buffer_count": 4, "ratio": 1},
        "reduce_bucket_size": 5e8,
        "sub_group_size": 1e14,
        "stage3_max_reuse_distance": 3e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "memory_efficient_linear": False,
        "zero_hpz_partition_size": 1,
    },
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "tensorboard": {"enabled": False, "output_path": "runs"},
    "flops_profiler": {},
}


def test_settings_of_unused_features_are_accepted(capsys):
    engine, *_ = fronts.initialize(model=net(), config=NAMED | TUTORIAL, comm=ringdp.init())
    assert (engine.scaler.current, engine.scaler.hysteresis) == (2.0**15, 3)
    for number in range(4):
        engine.backward(engine(batch(number)).float().mean() * (math.inf if number == 1 else 1.0))
        engine.step()
    lines = [f"step={step}, skipped=1, lr=[{LR}]" for step in (2, 4)]
    assert capsys.readouterr().out.splitlines() == lines
    engine.engine.close()


def test_the_old_name_of_bf16_is_understood():
    config = NAMED | {"bfloat16": {"enabled": True}}
    engine, *_ = fronts.initialize(model=net(), config=config, comm=ringdp.init())
    assert engine.bfloat16_enabled()
    engine.engine.close()


def test_gradients_are_clipped_to_1_unless_the_config_says_otherwise():
    norms = []
    for clipping in ({}, {"gradient_clipping": 1.0}, {"gradient_clipping": 0}):
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
        engine, *_ = fronts.initialize(
            model=net(), config=SIZED | sgd | clipping, comm=ringdp.init()
        )
        before = whole_parameters(engine.engine)
        engine.backward(1000 * engine(batch()).square().mean())
        engine.step()
        steps = zip(before, whole_parameters(engine.engine), strict=True)
        norms.append(torch.cat([(a - b).flatten() for a, b in steps]).norm().item())
        if norms[-1] > 2.0:  # not clipped
            assert engine.get_global_grad_norm() == pytest.approx(norms[-1])
        engine.engine.close()
    assert norms[:2] == pytest.approx([1.0, 1.0])
    assert norms[2] > 2.0


def test_parameter_groups_keep_their_options():
    model = net()
    first, *others = model.parameters()
    engine, optimizer, *_ = fronts.initialize(
        model=model, config=NAMED | {"zero_optimization": {"stage": 3}}, comm=ringdp.init(),
        model_parameters=[{"params": iter([first]), "lr": 0.0}, {"params": others}],
    )  # fmt: skip
    before = whole_parameters(engine.engine)
    after = train(engine, 0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, LR]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, *[False] * 5]
    engine.engine.close()


@pytest.mark.parametrize("section", ["fp16", "bf16"])
@on_ranks(2)
def test_a_model_in_16_bits_is_stepped_in_32(comm: Communicator, section: str) -> None:
    """As by DeepSpeed: small updates are not lost."""
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[section]
    found = []
    for model in (net().to(half), net().to(half).float()):
        config = NAMED | {"zero_optimization": {"stage": 2}, section: {"enabled": True}}
        engine, *_ = fronts.initialize(model=model, config=config, comm=comm)
        found.append(train(engine, 0, 1, 2))
        engine.engine.close()
    assert {p.dtype for p in found[0]} == {torch.float32}
    assert equal(*found)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("section", ["fp16", "bf16"])
@on_ranks(2)
def test_buffers_are_cast_to_16_bits(comm: Communicator, section: str, stage: int) -> None:
    """As by DeepSpeed, which calls model.half() or model.bfloat16(): a float32 buffer would make
    activations wider than the weights, or, of a batch norm, be refused."""
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[section]
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), Scaled(), *net())
    config = NAMED | {"zero_optimization": {"stage": stage}, section: {"enabled": True}}
    engine, *_ = fronts.initialize(model=model, config=config, comm=comm)
    train(engine, 0)
    assert [b.dtype for b in model.buffers()] == [half, half, torch.int64, half]
    twin = nn.Sequential(nn.BatchNorm1d(WIDTH), Scaled(), *net()).to(half)
    twin(batch(0).to(half))
    assert equal(model.buffers(), twin.buffers())
    engine.engine.close()


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_frozen_parameters_keep_16_bits(comm: Communicator, stage: int) -> None:
    """As in DeepSpeed: nothing steps them, and the outputs are the same. Unfrozen later they would
    be stepped in 16 bits."""
    outputs = []
    for widened in (False, True):
        model = net().to(torch.bfloat16)
        frozen = model[0].requires_grad_(False)
        if widened:
            model.float()
        config = SIZED | {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        adam = partial(torch.optim.Adam, lr=LR)
        engine, *_ = fronts.initialize(model=model, optimizer=adam, config=config, comm=comm)
        train(engine, 0, 1)
        dtypes = {torch.float32 if widened else torch.bfloat16}
        assert {p.dtype for p in frozen.parameters()} == dtypes
        outputs.append([engine(batch(2))])
        frozen.requires_grad_(True)
        message = r"parameter 0\.0\.weight was frozen at initialize"
        with nullcontext() if widened else pytest.raises(ringdp.UsageError, match=message):
            train(engine, 3)
        engine.engine.close()
    assert equal(*outputs)


@on_ranks(2)
def test_gradients_of_other_parameters_do_not_count(comm: Communicator) -> None:
    norms = []
    for frozen in (False, True):
        model = net()
        first, *rest = model.parameters()
        first.requires_grad_(not frozen)
        config = NAMED | {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.1}
        engine, *_ = fronts.initialize(model=model, config=config, model_parameters=rest, comm=comm)
        train(engine, 0, 1)
        norms.append(engine.get_global_grad_norm())
        engine.engine.close()
    assert norms[0] == pytest.approx(norms[1])


def test_auto_values_are_chosen_without_hugging_face():
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    tuned = (
        "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    )  # fmt: skip
    warm = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 2}
    config = NAMED | {
        **dict.fromkeys(sizes, "auto"), "train_batch_size": 4,
        "zero_optimization": {"stage": 3, **dict.fromkeys(tuned, "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": {**warm, "total_num_steps": 9}},
    }  # fmt: skip
    engine, *_ = fronts.initialize(model=net(), config=config, comm=ringdp.init())
    assert (engine.batches.micro, engine.batches.accumulation) == (4, 1)
    train(engine, 0, 1, 2)
    assert engine.get_lr() == pytest.approx([LR])
    engine.engine.close()


@pytest.mark.parametrize("section", [{}, {"bf16": {"enabled": True}}])
def test_gradients_are_reduced_in_communication_data_type(section):
    config = NAMED | section | {"communication_data_type": "fp16"}
    engine, *_ = fronts.initialize(model=net(), config=config, comm=ringdp.init())
    assert engine.engine.units[-1].dtypes.reduce is torch.float16
    engine.engine.close()


def test_host_memory_is_pinned_unless_the_config_disables_it(monkeypatch):
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    config = NAMED | {"zero_optimization": offload}
    engine, *_ = fronts.initialize(model=net(), config=config, comm=ringdp.init())
    assert engine.engine.ledger.offload == Offload(optimizer=True, pin=False)
    engine.engine.close()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Offload(pin=False).empty(3, torch.float32).shape == (3,)
    with pytest.raises(RuntimeError):  # there is no GPU
        Offload().empty(3, torch.float32)


def test_a_scheduler_of_a_given_optimizer_is_accepted():
    model = net()
    optimizer = ADAM(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    engine, *others = fronts.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=SIZED, comm=ringdp.init()
    )
    assert others == [optimizer, None, scheduler]
    for loss in (1.0, 2.0):
        engine.backward(engine(batch()).square().mean())
        engine.step(lr_kwargs={"metrics": loss})
    assert engine.get_lr() == [LR / 2]
    engine.engine.close()


@on_ranks(2)
def test_training_data_is_distributed_in_micro_batches(comm: Communicator) -> None:
    rows = TensorDataset(torch.arange(12))
    engine, _, loader, _ = fronts.initialize(
        model=net(), config=NAMED, training_data=rows, comm=comm,
        collate_fn=lambda batch: torch.stack([row for (row,) in batch]),
    )  # fmt: skip
    assert engine.training_dataloader is loader is not None
    mine = list(loader)
    assert [len(part) for part in mine] == [2] * 3
    every = torch.empty(12, dtype=torch.int64)
    comm.all_gather(every, torch.cat(mine))
    assert sorted(every.tolist()) == list(range(12))
    engine.engine.close()
