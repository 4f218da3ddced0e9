"""Names of other libraries on the fronts: DeepSpeed's engine methods work, and missing names say
what to use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from copy import copy
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, share_comm_ctx

import ringdp
from ringdp import CheckpointError, Communicator, UsageError
from ringdp.parallel import fronts
from ringdp.parallel.fronts import deepspeed_engine, fsdp, fsdp_module
from tests.equal import equal
from tests.parallel.small import batch, net, whole_parameters
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

HALF = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.01,
    "zero_optimization": {"stage": 2},
    "fp16": HALF,
}


def make_engine(comm: Communicator, **config: Any) -> Any:
    return fronts.initialize(
        model=net(), config=CONFIG | config, optimizer=ringdp.AdamW, comm=comm
    )[0]


def steps(engine: Any, *numbers: int) -> list[torch.Tensor]:
    for number in numbers:
        for part in range(3):
            assert engine.is_gradient_accumulation_boundary() == (part == 2)
            loss = engine(batch(3 * number + part)).float().square().mean()
            assert engine.backward(loss) == loss / 3
            assert engine.is_gradient_accumulation_boundary() == (part == 2)
            engine.step()
    return whole_parameters(engine.engine)


@on_ranks(2)
def test_deepspeeds_engine_methods_and_checkpoints_work(comm: Communicator, tmp_path: Path) -> None:
    engine = make_engine(comm)
    assert engine.get_global_grad_norm() is None
    saved = steps(engine, 0, 1)
    assert engine.get_global_grad_norm() > 0.01
    assert engine.train_batch_size() == 6 * comm.size
    assert engine.train_micro_batch_size_per_gpu() == 2
    assert engine.gradient_accumulation_steps() == 3
    assert engine.gradient_clipping() == 0.01
    assert engine.zero_optimization_stage() == 2
    assert engine.get_lr() == [engine.optimizer.param_groups[0]["lr"]]
    assert (engine.global_steps, engine.skipped_steps) == (2, 0)
    assert engine.device == torch.device("cpu")
    assert (engine.global_rank, engine.world_size) == (comm.rank, comm.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "7")
        assert engine.local_rank == 7
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (True, False)
    with pytest.raises(CheckpointError, match=r"nothing was loaded; .*latest"):
        engine.load_checkpoint(tmp_path)
    assert engine.save_checkpoint(tmp_path)
    assert engine.save_checkpoint(tmp_path, "named", {"epoch": 5})
    ringdp.save(tmp_path / "plain", engine.engine, engine.optimizer)
    with pytest.raises(CheckpointError, match="plain was loaded, but is not"):
        engine.load_checkpoint(tmp_path, "plain")
    expected = steps(engine, 2, 3)
    assert engine.scaler.current == 32  # it grew after the third step
    for tag, found, state in ((None, "named", {"epoch": 5}), ("global_step2", "global_step2", {})):
        other = make_engine(comm, zero_optimization={"stage": 3})
        # gradients left over from before the load
        other.backward(other(batch(0)).float().square().mean())
        assert other.load_checkpoint(tmp_path, tag) == (str(tmp_path / found), state)
        assert equal(whole_parameters(other.engine), saved)
        assert other.global_steps == 2
        assert equal(steps(other, 2, 3), expected)
        assert other.scaler.current == 32
        other.engine.close()
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "named"
    engine.engine.close()


@on_ranks(1)
def test_the_latest_tag_is_on_disk_before_it_counts(comm: Communicator, tmp_path: Path) -> None:
    """A power cut right after the rename would leave a file without its text."""
    engine, synced = make_engine(comm), set[int]()

    def fsync(fd: int, really: Any = os.fsync) -> None:
        really(fd)
        synced.add(os.fstat(fd).st_ino)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        engine.save_checkpoint(tmp_path)
    assert {(tmp_path / "latest").stat().st_ino, tmp_path.stat().st_ino} <= synced
    engine.engine.close()


@on_ranks(2)
def test_checkpoint_arguments_mean_the_same_as_deepspeeds(
    comm: Communicator, tmp_path: Path
) -> None:
    """save_latest=False, and loading without optimizer and scheduler."""
    engine, scheduled = (
        fronts.initialize(
            model=net(), optimizer=ringdp.AdamW, comm=comm,
            config=CONFIG | {"zero_optimization": {"stage": 3}},
            lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        )[0]
        for _ in range(2)
    )  # fmt: skip
    saved = steps(engine, 0, 1, 2)
    engine.save_checkpoint(tmp_path, "aside", save_latest=False)
    assert not (tmp_path / "latest").exists()
    scheduled.load_checkpoint(
        tmp_path, "aside", load_optimizer_states=False, load_lr_scheduler_states=False
    )
    assert equal(whole_parameters(scheduled.engine), saved)
    assert (scheduled.scaler.current, scheduled.lr_scheduler.last_epoch) == (16, 0)
    assert not scheduled.optimizer.state
    assert scheduled.get_lr() == scheduled.lr_scheduler.base_lrs
    assert scheduled.global_steps == 3
    # parameters are gathered and cast
    assert torch.equal(scheduled.forward(batch(1)), engine(batch(1)))
    for call, name in (
        (partial(engine.save_checkpoint, tmp_path), "exclude_frozen_parameters"),
        (partial(engine.load_checkpoint, tmp_path), "load_module_only"),
    ):
        with pytest.raises(UsageError, match=f"{name}=True is not implemented; allowed: False"):
            call(**{name: True})
    for each in (engine, scheduled):
        each.engine.close()


def test_missing_names_say_what_to_use():
    comm = ringdp.init()
    engine = make_engine(comm)
    wrapped = fronts.FullyShardedDataParallel(net(), comm)
    with pytest.raises(UsageError, match=r"no_sync is not implemented; use .*\.engine \(no_sync"):
        engine.no_sync  # noqa: B018
    fronts_and_names: list[tuple[Any, Iterable[str]]] = [
        (engine, deepspeed_engine.ABSENT),
        (wrapped, fsdp.ABSENT),
        (fronts.FullyShardedDataParallel, fsdp.ABSENT),
    ]
    for front, names in fronts_and_names:
        for name in names:
            assert not hasattr(front, name)
            with pytest.raises(UsageError, match=f": {name} is not implemented; use "):
                getattr(front, name)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            front.nothing  # noqa: B018
    for name, instead in (("check_is_root", "engine.model,"), ("register_comm_hook", "mixed_prec")):
        with pytest.raises(UsageError, match=f"{name} is not implemented; use {instead}"):
            getattr(wrapped, name)
    assert wrapped[1] is wrapped.module[1]
    assert copy(engine).module is engine.module
    for each in (engine, wrapped):
        each.engine.close()


@on_ranks(1)
def test_methods_of_torchs_fsdp_module_work_or_are_refused(comm: Communicator) -> None:
    model: Any = fronts.fully_shard(net(), comm=comm)
    assert isinstance(model, FSDPModule)
    public = {name for name in vars(FSDPModule) if not name.startswith("_")}
    absent = public - {*vars(fsdp_module.FSDPModule)}
    assert "set_unshard_in_backward" in absent
    for name in absent:
        method = getattr(model, name)
        given = [1 for p in signature(method).parameters.values() if p.default is p.empty]
        with pytest.raises(UsageError, match=f"fully_shard: {name} is not implemented; use ringdp"):
            method(*given)
    with pytest.raises(UsageError, match="fully_shard: share_comm_ctx is not implemented"):
        share_comm_ctx([model])
    sliced = model[:2]
    assert type(sliced) is torch.nn.Sequential
    assert sliced[0] is model[0]
    model.engine.close()


def test_a_modules_own_names_are_not_hidden():
    comm = ringdp.init()

    def named() -> Any:
        model: Any = net()
        model.register_comm_hook, model.no_sync = 1, 2
        return model

    wrapped = fronts.FullyShardedDataParallel(named(), comm)
    engine: Any = fronts.initialize(
        model=named(), config=CONFIG, optimizer=ringdp.AdamW, comm=comm
    )[0]
    assert wrapped.register_comm_hook == 1
    assert engine.no_sync == 2
    for each in (engine, wrapped):
        each.engine.close()
