"""Optimizer state of any form is restored to the ranks that had it. State that could not be loaded
is refused by the save."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ringdp
from ringdp import CheckpointError, Communicator
from ringdp.parallel.checkpoint.index import read_index
from ringdp.parallel.checkpoint.plan import planned
from ringdp.parallel.checkpoint.spans import pieces
from tests.parallel.small import net, step
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


class Vector(nn.Module):
    """One parameter; from stage 1 on, two ranks have 16 elements and 1 element of it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(17.0))

    def forward(self) -> Tensor:
        return (self.w**2).sum()


def make(comm: Communicator, stage: int) -> tuple[nn.Module, ringdp.Engine, torch.optim.Optimizer]:
    model = Vector()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    return model, engine, torch.optim.SGD(model.parameters(), lr=0.1)


def save(comm: Communicator, path: str, stage: int, state: Callable[..., dict[str, Any]]) -> None:
    model, engine, optimizer = make(comm, stage)
    optimizer.state[model.w].update(state(comm.rank, model.w))
    ringdp.save(path, engine, optimizer)
    engine.close()


def load(comm: Communicator, path: str, stage: int) -> dict[str, Any]:
    """The state as lists; elementwise state is compared with the rank's part of the parameter."""
    model, engine, optimizer = make(comm, stage)
    assert comm.size != 2 or stage == 0 or model.w.numel() == (16, 1)[comm.rank]
    optimizer.state[model.w]["old"] = 1  # loaded state replaces all
    ringdp.load(path, engine, optimizer)
    found = {}
    for name, value in optimizer.state.get(model.w, {}).items():
        found[name] = value
        if isinstance(value, Tensor):
            alike = value.shape == model.w.shape and value.numel() > 1
            found[name] = "as the parameter" if alike else (list(value.shape), value.tolist())
            assert not alike or torch.equal(value, model.w)
    engine.close()
    return found


def single_values(rank: int, w: Tensor) -> dict[str, Any]:
    return {"d": torch.full((1,), 3.0 + rank), "mu": torch.tensor(0.5 + rank), "each": w.detach()}


def test_single_values_of_any_shape_are_kept_per_rank(ranks, tmp_path):
    path = str(tmp_path)
    ranks(2)(save, path, 3, single_values)
    first = {"d": ([1], [3.0]), "mu": ([], 0.5), "each": "as the parameter"}
    second = {"d": ([1], [4.0]), "mu": ([], 1.5), "each": ([1], [16.0])}
    assert ranks(2)(load, path, 3) == [first, second]
    assert ranks(2)(load, path, 0) == [first, first], (
        "the values of the first rank that had elements"
    )
    assert ranks(1)(load, path, 2) == [first]


def on_rank_1(rank: int, w: Tensor) -> dict[str, Any]:
    kept = {"step": torch.tensor(2.0), "exp_avg": w.detach(), "calls": 3}
    return kept if rank == 1 else {}


def single_values_on_rank_1(rank: int, w: Tensor) -> dict[str, Any]:
    return {"calls": rank, "step": torch.tensor(float(rank))} if rank == 1 else {}


def refused_load(comm: Communicator, path: str, stage: int) -> str:
    model, engine, optimizer = make(comm, stage)
    optimizer.state[model.w]["mine"] = 1
    with pytest.raises(CheckpointError) as error:
        ringdp.load(path, engine, optimizer)
    assert dict(optimizer.state) == {model.w: {"mine": 1}}
    engine.close()
    return str(error.value)


def test_state_of_some_ranks_is_restored_to_them(ranks, tmp_path):
    path = str(tmp_path)
    ranks(2)(save, path, 3, on_rank_1)
    there = {"step": ([], 2.0), "exp_avg": ([1], [16.0]), "calls": 3}
    assert ranks(2)(load, path, 2) == [{}, there]
    (message,) = ranks(1)(refused_load, path, 3)
    assert "of optimizer/exp_avg/w, elements 0..17, there are only 1" in message
    ranks(2)(save, path, 3, single_values_on_rank_1)
    assert ranks(1)(load, path, 0) == [{"step": ([], 1.0), "calls": 1}]


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_a_loaded_state_can_be_saved_before_a_step(
    comm: Communicator, tmp_path: Path, stage: int
) -> None:
    """As load_state_dict has left it."""
    _, engine, optimizer = make(comm, stage)
    whole, groups = torch.arange(17.0), optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: {"mean": whole}}, "param_groups": groups})
    ringdp.save(tmp_path, engine, optimizer)
    ringdp.load(tmp_path, engine, optimizer)
    with engine.full_parameters():
        assert torch.equal(optimizer.state_dict()["state"][0]["mean"], whole)
    engine.close()


class TwoKinds(torch.optim.Optimizer):
    """Like timm's Muon: within a group, it counts steps for vectors only."""

    needs_whole_parameters = True

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["mean" if p.dim() == 1 else "momentum"] = p.grad.clone()
                if p.dim() == 1:
                    state["step"] = torch.tensor(1.0)


@on_ranks(2)
def test_state_of_one_group_may_be_of_two_kinds(comm: Communicator, tmp_path: Path) -> None:
    model = net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    optimizer = TwoKinds(model.parameters(), {})

    def whole() -> Any:
        with engine.full_parameters():
            return optimizer.state_dict()["state"]

    step(model, optimizer, 0)
    ringdp.save(tmp_path, engine, optimizer)
    before = whole()
    assert [{*state} for state in before.values()] == [{"momentum"}, {"mean", "step"}] * 3
    step(model, optimizer, 1)
    ringdp.load(tmp_path, engine, optimizer)
    torch.testing.assert_close(whole(), before)
    engine.close()


def mixed_kinds(rank: int, w: Tensor) -> dict[str, Any]:
    return {"d": torch.tensor(1.0) if rank else w.detach()}


def tensor_on_rank_1(rank: int, w: Tensor) -> dict[str, Any]:
    return {"d": torch.tensor(1.0) if rank else 1.0}


def mixed_dtypes(rank: int, w: Tensor) -> dict[str, Any]:
    return {"d": torch.zeros(w.shape, dtype=(torch.float32, torch.float64)[rank])}


def name_with_slash(rank: int, w: Tensor) -> dict[str, Any]:
    return {"a/b": 1}


def wrong_shape(rank: int, w: Tensor) -> dict[str, Any]:
    return {"d": torch.zeros(3)}


@pytest.mark.parametrize(
    ("stage", "state", "message"),
    [
        (0, on_rank_1, "ranks 0, 1: of optimizer/exp_avg/w, elements 0..17, there are only"),
        (
            3,
            mixed_kinds,
            "ranks 0, 1: optimizer/d/w is one value on a rank, one for each element on",
        ),
        (3, tensor_on_rank_1, "optimizer/d/w is a tensor on some ranks, and none on others"),
        (3, mixed_dtypes, "optimizer/d/w is float64 on rank 1, float32 on another"),
        (3, name_with_slash, "ranks 0, 1: the optimizer has state 'a/b'; allowed: names without /"),
        (
            3,
            wrong_shape,
            "SGD's state 'd' of parameter w has shape [3]; allowed where slices are stepped: one",
        ),
    ],
)
@on_ranks(2)
def test_state_that_could_not_be_loaded_is_refused_by_save(
    comm: Communicator,
    tmp_path: Path,
    stage: int,
    state: Callable[..., dict[str, Any]],
    message: str,
) -> None:
    """The previous checkpoint is intact, and there are no other files."""
    model, engine, optimizer = make(comm, stage)
    ringdp.save(tmp_path, engine, optimizer, extra={"save": 1})
    before = sorted(os.listdir(tmp_path))
    optimizer.state[model.w].update(state(comm.rank, model.w))
    with pytest.raises(CheckpointError, match="the checkpoint was not written") as error:
        ringdp.save(tmp_path, engine, optimizer, extra={"save": 2})
    assert message in str(error.value)
    comm.barrier()
    assert sorted(os.listdir(tmp_path)) == before
    assert ringdp.load(tmp_path, engine, optimizer) == {"save": 1}
    engine.close()


@pytest.mark.parametrize(
    ("option", "step"), [("fused", "meta"), ("capturable", "meta"), ("nesterov", "cpu")]
)
@on_ranks(1)
def test_loaded_state_is_on_the_devices_torch_uses(
    comm: Communicator, tmp_path: Path, option: str, step: str
) -> None:
    """If the parameter were on another device."""
    model, engine, optimizer = make(comm, 3)
    optimizer.param_groups[0][option] = True
    optimizer.state[model.w].update(single_values(comm.rank, model.w) | {"step": torch.tensor(2.0)})
    ringdp.save(tmp_path, engine, optimizer)
    there = [piece._replace(rest=piece.rest.to("meta")) for piece in pieces(engine)]
    plan = planned(read_index(tmp_path), engine, [optimizer], there)
    for read in plan.reads:
        if read.key.startswith("optimizer/"):
            read.put(torch.ones(read.end - read.begin))
    engine.close()
    found = {name: value.device.type for name, value in plan.kept[0].state.items()}
    assert found == {"d": "meta", "mu": "meta", "each": "meta", "step": step}


def on_all_ranks(rank: int, w: Tensor) -> dict[str, Any]:
    return {"step": torch.tensor(2.0), "mu": torch.tensor(0.5), "each": w.detach(), "calls": 3}


def test_state_of_all_ranks_is_loaded_by_any_number(ranks, tmp_path):
    path = str(tmp_path)
    ranks(2)(save, path, 3, on_all_ranks)
    there = {"step": ([], 2.0), "mu": ([], 0.5), "each": "as the parameter", "calls": 3}
    assert ranks(2)(load, path, 3) == [there, there | {"each": ([1], [16.0])}]
    assert ranks(1)(load, path, 0) == [there]


# ---- values keep their types

LOADABLE_AS = {  # dtype of a saved integer buffer -> the dtypes that can load it
    torch.int64: [torch.int64],
    torch.int32: [torch.int32, torch.int64],
    torch.uint8: [torch.uint8, torch.int32, torch.int64],
    torch.int8: [torch.int8, torch.int32, torch.int64],
    torch.bool: [torch.bool],
}


@pytest.mark.parametrize("dtype", LOADABLE_AS)
@on_ranks(2)
def test_integer_buffers_and_optimizer_options_keep_their_types(
    comm: Communicator, tmp_path: Path, dtype: torch.dtype
) -> None:
    for act, here in [(ringdp.save, dtype), *((ringdp.load, here) for here in LOADABLE_AS)]:
        model = Vector()
        model.register_buffer("ids", torch.tensor([act is ringdp.save, True]).to(here))
        engine = ringdp.shard(model, stage=1, comm=comm)
        rate = torch.tensor(0.5 if act is ringdp.save else 0.1)
        group = {"params": [model.w], "pair": (1, 2), "list": [1, 2], "rate": rate, "kind": "a"}
        group["betas"] = betas = (torch.tensor(float(rate)), 0.25)
        group["best"] = True if act is ringdp.save else None  # torch sets the option if it is None
        optimizer = torch.optim.SGD([group])
        if here in LOADABLE_AS[dtype]:
            act(tmp_path, engine, optimizer)
            assert (model.ids == 1).all()
            assert group["pair"] == (1, 2)
            assert group["list"] == [1, 2]
            assert group["kind"] == "a"
            assert group["best"] is True
            assert group["rate"] is rate
            assert group["betas"] == (0.5, 0.25)
            assert group["betas"][0] is betas[0]
            assert rate == 0.5
        else:
            with pytest.raises(CheckpointError, match=f"as {str(dtype)[6:]}, which is no {here}"):
                act(tmp_path, engine, optimizer)
        engine.close()


class Remembering(Vector):
    """It keeps a tensor as extra state, and how it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(2)
        self.register_buffer("seen", torch.zeros(2))

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"kept": self.kept}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.kept = state["kept"]
        self.modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@pytest.mark.parametrize("within", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@on_ranks(2)
def test_a_step_follows_a_load_within_any_mode(
    comm: Communicator, tmp_path: Path, within: Callable[[], AbstractContextManager[object]]
) -> None:
    """And extra state can be trained, and a buffer made in the same mode is loaded."""
    model = Remembering()
    engine = ringdp.shard(model, stage=1, comm=comm)
    saved, loaded = (torch.optim.Adam(model.parameters()) for _ in range(2))
    model().backward()
    saved.step()
    ringdp.save(tmp_path, engine, saved)
    with within():
        model.seen = torch.ones(2)
        ringdp.load(tmp_path, engine, loaded)
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    assert model.modes == modes
    assert model.seen.tolist() == [0, 0]
    model().backward()
    loaded.step()
    assert all(state["step"] == 2 for state in loaded.state.values())
    model.kept += nn.Parameter(torch.ones(2))
    engine.close()


@on_ranks(2)
def test_a_group_may_have_its_parameters_in_another_order(
    comm: Communicator, tmp_path: Path
) -> None:
    model = nn.Linear(3, 3)
    engine = ringdp.shard(model, stage=1, comm=comm)
    model(torch.ones(1, 3)).sum().backward()
    named = [*model.named_parameters()]
    saved, loaded = (torch.optim.Adam(order) for order in (named, named[::-1]))
    saved.step()
    ringdp.save(tmp_path, engine, saved)
    ringdp.load(tmp_path, engine, loaded)
    assert loaded.param_groups[0]["param_names"] == [name for name, _ in named[::-1]]
    torch.testing.assert_close(dict(loaded.state), dict(saved.state))
    engine.close()


@on_ranks(2)
def test_a_conjugated_buffer_is_saved_and_exported(comm: Communicator, tmp_path: Path) -> None:
    """Only a bit in the tensor says that its memory is to be conjugated."""
    model = Vector()
    model.register_buffer("phases", torch.tensor([1 + 2j, 3 - 4j]).conj())
    engine = ringdp.shard(model, stage=1, comm=comm)
    before = model.phases.clone()
    ringdp.save(tmp_path / "all", engine)
    ringdp.export(tmp_path / "model.safetensors", engine)
    model.phases.zero_()
    ringdp.load(tmp_path / "all", engine)
    comm.barrier()
    for phases in (model.phases, load_file(tmp_path / "model.safetensors")["phases"]):
        assert torch.equal(phases, before)
    engine.close()
