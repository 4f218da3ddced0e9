"""Damaged, foreign or forged checkpoints are refused on every rank without changes; failing saves
leave no files, and no save removes files that are not its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringdp
from ringdp import CheckpointError, Communicator, UsageError
from ringdp.parallel.checkpoint.index import read_index
from ringdp.parallel.checkpoint.tensorfile import TensorFile, write
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9))


# ---- one file


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bool), "c": torch.ones(0)}
    write(path, tensors, {key: [0] for key in tensors})
    (tmp_path / "mine").touch()
    assert path.stat().st_mode == (tmp_path / "mine").stat().st_mode
    whole = path.read_bytes()
    file = TensorFile(path)
    assert file.read("a", 2, 4).tolist() == [2, 3]
    assert file.read("b", 0, 2).tolist() == [True, True]
    assert file.read("c", 0, 0).numel() == 0
    assert file.dtype_and_elements("a") == (torch.float32, 6)
    with pytest.raises(CheckpointError, match="no 1-D tensor d"):
        file.dtype_and_elements("d")
    for cut in (0, 4, 30, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            TensorFile(path).dtype_and_elements("b")


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]},
    ],
)
def test_a_forged_header_is_refused(tmp_path, entry):
    path = tmp_path / "x.safetensors"
    text = json.dumps({"a": entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CheckpointError):
        TensorFile(path).dtype_and_elements("a")
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="header"):
        TensorFile(path)


# ---- the index

WEIGHT = "parameter/0.weight"
STATE = "optimizer/exp_avg/0.weight"
SINGLE = "optimizer/mu_product/0.weight"
A_STATE = {"dtype": "float32", "shape": [9, 9], "parts": [[0, 0, 81]], "single": None}
A_NUMBER = {"dtype": "float32", "shape": [], "parts": [[0, 0, 1]], "single": None}


def put(*keys: Any, value: Any) -> Callable[[Any], Any]:
    """A function that changes one entry of an index."""

    def change(index: Any) -> Any:
        at = index
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value
        return index

    return change


FORGED = {
    "a list": lambda _: [],
    "format": put("format", value="ringdp.checkpoint.3"),
    "more fields": put("more", value=1),
    "a path upwards": put("directory", value="../other"),
    "an absolute path": put("directory", value="/etc"),
    "a path that starts well": put("directory", value="data-0123456789abcdef/../.."),
    "no path": put("directory", value=None),
    "no tensors": put("tensors", value=[]),
    "a rank too many": put("tensors", WEIGHT, "parts", 0, 0, value=7),
    "a rank that is none": put("tensors", WEIGHT, "parts", 0, 0, value="../0"),
    "a hole": put("tensors", WEIGHT, "parts", 0, 2, value=3),
    "an overlap": put("tensors", WEIGHT, "parts", 1, 1, value=0),
    "backwards": put("tensors", WEIGHT, "parts", 0, 2, value=-1),
    "too short": put("tensors", WEIGHT, "shape", value=[10, 10]),
    "no shape": put("tensors", WEIGHT, "shape", value="99"),
    "no modules": lambda index: {k: v for k, v in index.items() if k != "modules"},
    "no list for a shape": put("tensors", "extra/0/x", value=A_NUMBER | {"shape": {}}),
    "no list for single values": put("tensors", SINGLE, "single", value={}),
    "options": put("groups", 0, "options", "params", value=[]),
    "a number for an optimizer": put("optimizer", value=7),
    "no optimizer": lambda index: {k: v for k, v in index.items() if k != "optimizer"},
    "names": put("groups", 0, "names", value=[[]]),
    "extra": put("extra", value=3),
    "ranks": put("ranks", value="2"),
    "stage": put("stage", value="x"),
    "a rank below 0": put("tensors", WEIGHT, "parts", 0, 0, value=-2),
    "a part of a fraction": put("tensors", WEIGHT, "parts", 0, 1, value=0.0),
    "a shape of a fraction": put("tensors", WEIGHT, "shape", value=[9.0, 9]),
    "a shape below 0": put("tensors", WEIGHT, "shape", value=[-9, -9]),
    "a number for a dtype": put("tensors", WEIGHT, "dtype", value=5),
    "single values of a parameter": put("tensors", WEIGHT, "single", value=[]),
    "state of another shape": put("tensors", STATE, "shape", value=[80]),
    "state of no parameter": put("tensors", "optimizer/exp_avg/3.weight", value=A_STATE),
    "state without a step": lambda index: index["tensors"].pop("optimizer/step/0.bias") and index,
    "a step of one rank": put("tensors", "optimizer/step/0.weight", "parts", value=[[1, 41, 81]]),
    "an overlap of state": put("tensors", STATE, "parts", 1, 1, value=0),
    "state past the end": put("tensors", STATE, "parts", 1, 2, value=82),
    "options that are text": put("groups", 0, "options", value="abc"),
    "groups that are a number": put("groups", value=3),
    "a group without names": put("groups", 0, value={"options": {}}),
    "a scalar beside a tensor": put("scalars", SINGLE, value=[[0, 81, "x"]]),
    "a scalar of no parameter": put("scalars", "optimizer/x/3.weight", value=[[0, 81, "x"]]),
    "a scalar without a place": put("scalars", "optimizer/x/0.weight", value="x"),
    "a scalar's place that is text": put("scalars", "optimizer/x/0.weight", value=[["0", 81, "x"]]),
}
MISMATCHED = {
    "dtype": put("tensors", WEIGHT, "dtype", value="float64"),
    "no dtype": put("tensors", WEIGHT, "dtype", value="float31"),
    "integers": put("tensors", WEIGHT, "dtype", value="int32"),
    "another shape": put("tensors", "buffer/1.running_mean", "shape", value=[3, 3]),
    "state with a hole": put("tensors", STATE, "parts", 1, 1, value=80),
    "state that is single": put("tensors", STATE, "single", value=[]),
    "single values that are two": put("tensors", SINGLE, "single", value=[2]),
    "state of each that was single": put("tensors", SINGLE, "single", value=None),
    "state that is not packed": put("scalars", "optimizer/x/0.weight", value=[[0, 81, 3]]),
    "state that names no tensor": put(
        "scalars", "optimizer/x/0.weight", value=[[0, 81, {"list": [{"tensor": "x[0]"}]}]]
    ),
    "state of another dtype": put("tensors", STATE, "dtype", value="int32"),
    "a rate that is text": put("groups", 0, "options", "lr", value="abc"),
    "no rate": put("groups", 0, "options", "lr", value=None),
    "another optimizer": put("optimizer", value="AdamW"),
    "a number for two": put("groups", 0, "options", "betas", value=7),
    "three numbers for two": put("groups", 0, "options", "betas", value=[0.1, 0.2, 0.3]),
    "text for one of two": put("groups", 0, "options", "betas", value=[0.1, "x"]),
    "text for a flag": put("groups", 0, "options", "maximize", value="no"),
    "parts swapped": lambda index: (
        [part.__setitem__(0, 1 - part[0]) for part in index["tensors"][WEIGHT]["parts"]] and index
    ),
}


def save(comm: Communicator, path: str) -> None:
    model = net()
    engine = ringdp.shard(model, stage=3, unit=nn.Linear, comm=comm)
    optimizer = torch.optim.NAdam(model.parameters())  # has state with one value per parameter
    model(torch.ones(4, 9)).sum().backward()
    optimizer.step()
    ringdp.save(path, engine, optimizer, extra={"save": 1})
    engine.close()


def load_damaged(comm: Communicator, path: str, whole: str, stage: int) -> list[str]:
    """The error messages of loading every damaged checkpoint; the intact one is loaded at the
    end."""
    model = net(seed=1)
    engine = ringdp.shard(model, stage=stage, comm=comm)
    optimizer = torch.optim.NAdam(model.parameters(), lr=7.0)
    messages = []

    def values() -> list[Any]:
        with engine.full_parameters():
            return [v.tolist() for v in model.state_dict().values()]

    before = values()
    for damaged in sorted(os.listdir(path)):
        with pytest.raises(CheckpointError) as error:
            ringdp.load(Path(path) / damaged, engine, optimizer)
        messages.append(str(error.value))
        assert values() == before, damaged
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == 7.0
    assert ringdp.load(whole, engine, optimizer) == {"save": 1}
    assert values() != before
    assert optimizer.param_groups[0]["lr"] != 7.0
    found = {tuple(s[k].shape) for s in optimizer.state.values() for k in ("step", "mu_product")}
    assert found <= {()}
    engine.close()
    return messages


def damage(whole: Path, path: Path) -> None:
    """Writes a directory for every way to damage a checkpoint."""

    def copy(name: str) -> tuple[Path, Any]:
        there = path / name
        for file in [f for f in whole.rglob("*") if f.is_file()]:
            (there / file.relative_to(whole)).parent.mkdir(parents=True, exist_ok=True)
            (there / file.relative_to(whole)).write_bytes(file.read_bytes())
        return there, json.loads((there / "index.json").read_bytes())

    for name, change in (FORGED | MISMATCHED).items():
        there, index = copy(name)
        (there / "index.json").write_text(json.dumps(change(index)), encoding="utf-8")
    for rank in range(2):
        for name in ("missing", "cut"):
            there, index = copy(f"{name} {rank}")
            file = there / index["directory"] / f"rank-0000{rank}.safetensors"
            data = file.read_bytes()
            file.unlink()
            if name == "cut":
                file.write_bytes(data[:-8])
    there, _ = copy("index cut")
    (there / "index.json").write_text(
        (whole / "index.json").read_text(encoding="utf-8")[:-9], encoding="utf-8"
    )


def test_damaged_and_forged_checkpoints_are_refused_on_all_ranks(ranks, tmp_path):
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    ranks(2)(save, str(whole))
    assert read_index(whole).optimizer == "NAdam"
    damage(whole, damaged)
    for name in FORGED:
        with pytest.raises(CheckpointError):
            read_index(damaged / name)
    with pytest.raises(CheckpointError, match=r"format 'ringdp\.checkpoint\.3', not 'ringdp\.che"):
        read_index(damaged / "format")
    for stage in (0, 3):
        first, second = ranks(2)(load_damaged, str(damaged), str(whole), stage)
        assert first == second, "every rank raises the same error"
        assert len(first) == len(FORGED) + len(MISMATCHED) + 5
        assert sum("running_mean of shape [3, 3], not [9]" in text for text in first) == 1
        missing = [text for text in first if "rank-00001" in text]
        assert len(missing) >= 2


# ---- what a save leaves


def save_fails(comm: Communicator, path: str) -> None:
    """Rank 0 has a buffer that no checkpoint can hold: all ranks raise, and no file is left."""
    model = net()
    engine = ringdp.shard(model, stage=3, comm=comm)
    ringdp.save(path, engine, extra={"save": 1})
    ringdp.export(Path(path) / "model.safetensors", engine)
    before = sorted(os.listdir(path))
    with pytest.raises(UsageError, match=r"state_dict of a sharded model.*ringdp\.save"):
        model.state_dict()
    with pytest.raises(UsageError, match=r"full_parameters\(write=True\), or use ringdp\.load"):
        model.load_state_dict(net().state_dict())
    with engine.full_parameters(write=True):
        model.load_state_dict(net(seed=4).state_dict())
        for attempt in (ringdp.save, ringdp.load):
            with pytest.raises(UsageError, match="within full_parameters"):
                attempt(path, engine)
    ringdp.save(path, engine, extra={"save": 2})
    ringdp.load(path, engine)
    with engine.full_parameters():
        assert torch.equal(model[0].weight, net(seed=4)[0].weight)
    model.register_buffer("odd", torch.ones(2, dtype=torch.complex128))
    for attempt in (
        lambda: ringdp.save(path, engine),
        lambda: ringdp.export(Path(path) / "model.safetensors", engine),
        lambda: ringdp.export(Path(path) / "nowhere" / "model.safetensors", engine),
    ):
        with pytest.raises(CheckpointError, match="was not written; rank 0: "):
            attempt()
    with pytest.raises(CheckpointError, match=r"rank 1: extra, or what .* is not JSON"):
        ringdp.save(path, engine, extra={"x": object()} if comm.rank == 1 else {})
    comm.barrier()
    after = sorted(os.listdir(path))
    assert [n for n in after if "data-" not in n] == [n for n in before if "data-" not in n]
    assert len(after) == len(before)
    engine.close()


def test_failing_saves_leave_no_files_and_remove_none_of_the_users(ranks, tmp_path):
    own = [tmp_path / "data-train" / "x", tmp_path / "data-0123456789abcdeg" / "y"]
    for file in own:
        file.parent.mkdir()
        file.touch()
    stale = tmp_path / "data-0123456789abcdef"  # of a save that was killed
    stale.mkdir()
    ranks(2)(save_fails, str(tmp_path))
    assert all(file.exists() for file in own)
    assert not stale.exists()


@on_ranks(1)
def test_an_export_replaces_a_file_and_nothing_else(comm: Communicator, tmp_path: Path) -> None:
    """As root, a rename would replace even /dev/null. Of a link it replaces the file."""
    pipe, file, link = (tmp_path / name for name in ("pipe", "file", "link"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    engine = ringdp.shard(net(), stage=0, comm=comm)
    for path in (pipe, tmp_path):
        with pytest.raises(CheckpointError, match=f"{path} exists, and is no file"):
            ringdp.export(path, engine)
    assert pipe.is_fifo()
    ringdp.export(link, engine)
    assert link.is_symlink()
    assert file.stat().st_size
    engine.close()


def save_to_different_paths(comm: Communicator, path: Path) -> None:
    """Each rank passes another path; the one of rank 0 holds a checkpoint."""
    engine = ringdp.shard(net(), stage=3, comm=comm)
    ringdp.save(path / "0", engine, extra={"save": 1})
    with pytest.raises(CheckpointError, match=r"rank 0: .* no file of ranks \[1\]: they wrote els"):
        ringdp.save(path / str(comm.rank), engine, extra={"save": 2})
    assert ringdp.load(path / "0", engine) == {"save": 1}
    engine.close()


def test_a_save_to_different_paths_is_refused_and_keeps_the_previous_one(ranks, tmp_path):
    ranks(2)(save_to_different_paths, tmp_path)
    assert os.listdir(tmp_path / "1") == []
    assert len(os.listdir(tmp_path / "0")) == 2
