"""Loss scales and learning rate schedulers of `initialize`, in training and in checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

import ringdp
from ringdp import Communicator, ModelError
from ringdp.parallel import fronts
from tests.equal import equal
from tests.parallel.fronts.test_initialize import LR, NAMED, train
from tests.parallel.small import batch, net, whole_parameters
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

# ---- loss scales


@pytest.mark.parametrize("half", [{"loss_scale": 0.5}, {"enabled": False, "min_loss_scale": 4}])
def test_a_fixed_loss_scale_may_be_below_the_minimum(half):
    config = NAMED | {"fp16": {"enabled": True} | half}
    engine, *_ = fronts.initialize(model=net(), config=config, comm=ringdp.init())
    assert engine.scaler.current == half.get("loss_scale", 1.0)
    engine.engine.close()


@on_ranks(2)
def test_overflows_at_the_least_loss_scale_are_an_error(comm: Communicator) -> None:
    """As in DeepSpeed's stages 1 to 3, once the hysteresis is used up."""
    for stage in range(4):
        dynamic = {"enabled": True, "initial_scale_power": 1}
        config = NAMED | {"zero_optimization": {"stage": stage}, "fp16": dynamic}
        engine, *_ = fronts.initialize(model=net(), config=config, comm=comm)

        def overflow(engine: Any = engine) -> None:
            engine.backward(engine(batch()).float().mean() * (math.inf if comm.rank else 1.0))
            engine.step()

        overflow()
        overflow()
        assert engine.scaler.current == 1
        with pytest.raises(ModelError, match=r"overflowed at a loss scale of 1\.0, the least"):
            overflow()
        train(engine, 0)
        assert (engine.skipped_steps, engine.global_steps) == (3, 4)
        engine.engine.close()


@pytest.mark.parametrize(
    ("section", "scale"),
    [({"fp16": {"enabled": True, "loss_scale": 128}}, 128), ({"bf16": {"enabled": True}}, 1)],
)
def test_a_fixed_loss_scale_stays_when_a_checkpoint_is_loaded(section, scale, tmp_path):
    dynamic = {"fp16": {"enabled": True, "initial_scale_power": 30}}
    engine, *_ = fronts.initialize(model=net(), config=NAMED | dynamic, comm=ringdp.init())
    engine.save_checkpoint(tmp_path)
    engine.engine.close()
    engine, *_ = fronts.initialize(model=net(), config=NAMED | section, comm=ringdp.init())
    engine.load_checkpoint(tmp_path)
    train(engine, 0)
    assert (engine.scaler.current, engine.skipped_steps) == (scale, 0)
    engine.engine.close()


@pytest.mark.parametrize(
    ("hysteresis", "scales"),
    [(1, [8, 8, 16, 8, 4, 4, 4, 8, 8, 16, 8]), (2, [8, 8, 16, 16, 8, 8, 8, 16, 16, 32, 32])],
)
def test_a_dynamic_loss_scale_grows_as_deepspeeds(hysteresis, scales):
    """As in DeepSpeed 0.19.8: after `loss_scale_window` finite steps, and one more at first."""
    dynamic = {"initial_scale_power": 3, "loss_scale_window": 2, "hysteresis": hysteresis}
    engine, *_ = fronts.initialize(
        model=net(), config=NAMED | {"fp16": {"enabled": True} | dynamic}, comm=ringdp.init()
    )
    found = []
    for step in range(len(scales)):
        factor = math.inf if step in (3, 4, 10) else 1.0
        engine.backward(engine(batch(step)).float().mean() * factor)
        engine.step()
        found.append(engine.scaler.current)
    assert found == scales
    engine.engine.close()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "scaled", [{"gradient_accumulation_steps": 2}, {"fp16": {"enabled": True}}], ids=str
)
@on_ranks(2)
def test_a_backward_without_the_loss_scale_is_an_error(
    comm: Communicator, scaled: dict[str, Any], stage: int
) -> None:
    config = NAMED | scaled | {"zero_optimization": {"stage": stage}}
    engine, *_ = fronts.initialize(model=net(), config=config, comm=comm)
    for call in (engine.step, lambda: engine.backward(engine(batch()).float().mean())):
        engine(batch()).float().mean().backward()
        with pytest.raises(ringdp.UsageError, match=r"call the engine's backward\(loss\)"):
            call()
    engine.optimizer.zero_grad()
    train(engine, 0, 1)
    engine.engine.close()


@on_ranks(2)
def test_gradients_of_a_backward_without_the_loss_scale_can_be_cleared(comm: Communicator) -> None:
    """As those that a generator's backward leaves in its critic."""
    config = NAMED | {"fp16": {"enabled": True}}
    critic, generator = (
        fronts.initialize(model=net(), config=config, comm=comm)[0] for _ in range(2)
    )
    for _ in range(2):
        critic.zero_grad()
        train(critic, 0)
        generator.backward(critic(generator(batch())).float().mean())
        generator.step()
    with pytest.raises(ringdp.UsageError, match=r"call the engine's backward\(loss\)"):
        train(critic, 0)
    for engine in (critic, generator):
        engine.engine.close()


@on_ranks(2)
def test_a_backward_without_a_loss_scale_can_be_torchs(comm: Communicator) -> None:
    found = []
    for direct in (True, False):
        engine, *_ = fronts.initialize(model=net(), config=NAMED, comm=comm)
        loss = engine(batch()).mean()
        loss.backward() if direct else engine.backward(loss)
        engine.step()
        found.append(whole_parameters(engine.engine))
        engine.engine.close()
    assert equal(*found)


# ---- schedulers


def falling(optimizer: torch.optim.Optimizer) -> MultiStepLR:
    return MultiStepLR(optimizer, range(1, 9), gamma=0.5)  # its state must be converted to JSON


@on_ranks(2)
def test_a_scheduler_steps_with_the_optimizer_and_is_saved(
    comm: Communicator, tmp_path: Path
) -> None:
    half = {"fp16": {"enabled": True, "initial_scale_power": 4}}
    config = NAMED | half | {"gradient_accumulation_steps": 2}

    def make_engine(**given: Any) -> Any:
        engine, _, _, scheduler = fronts.initialize(model=net(), config=config, comm=comm, **given)
        assert engine.lr_scheduler is scheduler
        return engine

    engine = make_engine(lr_scheduler=falling)
    train(engine, 0)
    assert engine.get_lr() == [LR]
    train(engine, 1)
    assert engine.get_lr() == [LR / 2]
    for step in (2, 3):
        engine.backward(engine(batch(step)).square().mean() * float("inf"))
        engine.step()
    assert (engine.skipped_steps, engine.get_lr()) == (1, [LR / 2])  # no rank has stepped
    engine.save_checkpoint(tmp_path)
    expected = train(engine, 4, 5, 6, 7)
    other, without = make_engine(lr_scheduler=falling), make_engine()
    for loaded in (other, without):
        loaded.load_checkpoint(tmp_path)
    assert equal(train(other, 4, 5, 6, 7), expected)
    assert other.get_lr() == engine.get_lr() == [LR / 8]
    assert other.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()
    without.save_checkpoint(tmp_path, "without")
    other.load_checkpoint(tmp_path, "without")
    assert other.lr_scheduler.last_epoch == 3
    for each in (engine, other, without):
        each.engine.close()


def test_a_scheduler_of_schedulers_is_saved(tmp_path):
    def warm(optimizer: torch.optim.Optimizer) -> SequentialLR:
        return SequentialLR(optimizer, [LinearLR(optimizer), falling(optimizer)], [2])

    found = []
    for tag in (None, "saved"):
        engine, *_ = fronts.initialize(
            model=net(), config=NAMED, lr_scheduler=warm, comm=ringdp.init()
        )
        if tag is None:
            train(engine, 0, 1, 2)
            engine.save_checkpoint(tmp_path, "saved")
        else:
            engine.load_checkpoint(tmp_path, tag)
        train(engine, 3, 4)
        found.append(engine.lr_scheduler.state_dict())
        engine.engine.close()
    assert found[0] == found[1]


def rates(name: str, steps: int, **params: Any) -> list[float]:
    config = NAMED | {"scheduler": {"type": name, "params": params}}
    engine, optimizer, _, scheduler = fronts.initialize(
        model=net(), config=config, comm=ringdp.init()
    )
    assert scheduler is engine.lr_scheduler
    assert scheduler.optimizer is optimizer
    found = []
    for step in range(steps):
        found += engine.get_lr()  # the learning rate of the next step
        train(engine, step)
    engine.engine.close()
    return found


def test_schedulers_of_a_config_are_deepspeeds_or_torchs():
    warm: dict[str, Any] = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}
    logs = [0.1 + 0.4 * math.log(n) / math.log(4) for n in (1, 1, 2, 3, 4)]
    assert rates("WarmupLR", 6, **warm) == pytest.approx([*logs, 0.5])
    line = [0.1, 0.1, 0.2, 0.3, 0.4]
    assert rates("WarmupLR", 7, **warm, warmup_type="linear") == pytest.approx([*line, 0.5, 0.5])
    falls = rates("WarmupDecayLR", 9, **warm, warmup_type="linear", total_num_steps=6)
    assert falls == pytest.approx([*line, 0.5, 0.3, 0.1, 0.1])
    # up to the optimizer's own rate
    assert rates("WarmupLR", 4, warmup_num_steps=1) == pytest.approx([0, 0, LR, LR])
    cosine = rates(
        "WarmupCosineLR", 10, total_num_steps=8, warmup_num_steps=4, warmup_type="linear",
        warmup_min_ratio=0.2, cos_min_ratio=0.1,
    )  # fmt: skip
    down = [0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4, 4)]
    assert cosine == pytest.approx([LR * r for r in (0, 0.2, 0.4, 0.6, 0.8, *down)])
    assert rates("StepLR", 3, step_size=2, gamma=0.5) == pytest.approx([LR, LR, LR / 2])


def test_a_warm_up_rises_to_each_groups_own_rate():
    model = net()
    first, *others = model.parameters()
    engine, *_ = fronts.initialize(
        model=model, model_parameters=[{"params": [first], "lr": 1.0}, {"params": others}],
        config=NAMED | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}},
        comm=ringdp.init(),
    )  # fmt: skip
    train(engine, 0, 1, 2)
    assert engine.get_lr() == pytest.approx([1.0, LR])
    engine.engine.close()
