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
from tests.ranks import on_ranks

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


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_extra_state_is_restored_and_checked(
    comm: Communicator, tmp_path: Path, stage: int
) -> None:
    model = nn.Sequential(
        WithExtraState(STATE if comm.rank == 0 else "rank 0's counts"), WithExtraState(5)
    )
    engine = ringdp.shard(model, stage=stage, comm=comm)
    ringdp.save(tmp_path, engine)
    engine.close()
    other = nn.Sequential(WithExtraState(), WithExtraState())
    engine = ringdp.shard(other, stage=3 - stage, comm=comm)
    ringdp.load(tmp_path, engine)
    assert repr(other[0].state) == repr(STATE)
    assert other[1].state == 5
    engine.close()
    for first, act, message in (
        (nn.Linear(4, 4), ringdp.load, "has other extra state: of 0"),
        (WithExtraState({1, 2}), ringdp.save, "extra state of module 0 has a set"),
    ):
        engine = ringdp.shard(nn.Sequential(first, WithExtraState()), stage=2, comm=comm)
        with pytest.raises(CheckpointError, match=message):
            act(tmp_path, engine)
        engine.close()
    model = nn.Sequential(WithExtraState(), WithExtraState())
    engine = ringdp.shard(model, stage=2, comm=comm)
    index = tmp_path / "index.json"
    whole = index.read_text(encoding="utf-8")
    for forged in ({"0": {"pickle": "x"}}, {"0": {"tensor": "extra/9/0"}}, {"0": 3}, []):
        comm.barrier()
        if comm.rank == 0:
            modules = json.loads(whole)["modules"]
            modules = modules | forged if isinstance(forged, dict) else forged
            index.write_text(json.dumps(json.loads(whole) | {"modules": modules}), encoding="utf-8")
        comm.barrier()
        with pytest.raises(CheckpointError):
            ringdp.load(tmp_path, engine)
        assert model[0].state is None
    engine.close()
