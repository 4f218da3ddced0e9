"""The extra state of modules (get_extra_state) is saved and restored unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringdp
from ringdp import CheckpointError, Communicator

pytestmark = pytest.mark.process

STATE: dict[str, Any] = {
    "scale": 0.1,
    "window": (3, [None, True, "name"]),
    "amax": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "whole": torch.tensor(7),
    "nested": {"list": [torch.ones(2, dtype=torch.bool)], "dict": {}},
}


class WithExtraState(nn.Linear):
    def __init__(self, state: Any = None) -> None:
        super().__init__(4, 4)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def save_and_load(comm: Communicator, path: str, stage: int) -> None:
    model = nn.Sequential(
        WithExtraState(STATE if comm.rank == 0 else "rank 0's counts"), WithExtraState(5)
    )
    engine = ringdp.shard(model, stage=stage, comm=comm)
    ringdp.save(path, engine)
    engine.close()
    other = nn.Sequential(WithExtraState(), WithExtraState())
    engine = ringdp.shard(other, stage=3 - stage, comm=comm)
    ringdp.load(path, engine)
    assert repr(other[0].state) == repr(STATE)
    assert other[1].state == 5
    engine.close()


def load_wrong_extra_state(comm: Communicator, path: str) -> list[str]:
    messages = []
    models = [
        nn.Sequential(nn.Linear(4, 4), WithExtraState()),
        nn.Sequential(WithExtraState({1, 2}), WithExtraState()),
    ]
    for model, act in zip(models, (ringdp.load, ringdp.save), strict=True):
        engine = ringdp.shard(model, stage=2, comm=comm)
        with pytest.raises(CheckpointError) as error:
            act(path, engine)
        messages.append(str(error.value))
        engine.close()
    model = nn.Sequential(WithExtraState(), WithExtraState())
    engine = ringdp.shard(model, stage=2, comm=comm)
    index = Path(path) / "index.json"
    whole = index.read_text(encoding="utf-8")
    for forged in ({"0": {"pickle": "x"}}, {"0": {"tensor": "extra/9/0"}}, {"0": 3}, []):
        comm.barrier()
        if comm.rank == 0:
            modules = json.loads(whole)["modules"]
            modules = modules | forged if isinstance(forged, dict) else forged
            index.write_text(json.dumps(json.loads(whole) | {"modules": modules}), encoding="utf-8")
        comm.barrier()
        with pytest.raises(CheckpointError):
            ringdp.load(path, engine)
        assert model[0].state is None
    engine.close()
    return messages


@pytest.mark.parametrize("stage", [0, 3])
def test_extra_state_is_restored_and_checked(ranks, tmp_path, stage):
    ranks(2)(save_and_load, str(tmp_path), stage)
    for missing, kind in ranks(2)(load_wrong_extra_state, str(tmp_path)):
        assert "has other extra state: of 0" in missing
        assert "extra state of module 0 has a set" in kind
