"""Bench contenders on GPUs, tested without one: devices of ranks, calls of torch, refusals."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringdp.cli import gpus
from ringdp.cli.bench import peers, worker
from ringdp.cli.bench.cases import Task
from ringdp.cli.bench.contenders import Buffers, Round, Torchs
from ringdp.errors import UsageError

TASK = Task("all_reduce", "torch-nccl", False, "float32", "sum", 16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Simulates rank 3 of 4 on two GPUs; returns its calls of torch, in order."""
    recorded: list[Any] = []
    for name, value in {"RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: recorded.append(index))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: recorded.append("synchronize"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: recorded.append((a, k)))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for call in ("barrier", "all_reduce"):
        monkeypatch.setattr(dist, call, lambda *_, call=call: recorded.append(call))
    return recorded


def test_ranks_that_share_a_gpu_pose_as_hosts(calls: list[Any]) -> None:
    assert gpus.take("nccl") == ("cuda:1", ", 2 GPUs: through sockets")
    assert calls == [1]
    assert os.environ["NCCL_HOSTID"] == "ringdp-3"
    assert gpus.SOCKETS.items() <= os.environ.items()


def test_a_rank_with_its_own_gpu_does_not_change_nccls_settings(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    before = dict(os.environ)
    assert gpus.take("nccl") == gpus.take("peer") == ("cuda:3", "")
    assert os.environ == before


def test_peer_memory_ranks_share_a_gpu_by_turns(calls: list[Any]) -> None:
    before = dict(os.environ)
    assert gpus.take("peer") == ("cuda:1", ", 2 GPUs: by turns")
    assert os.environ == before


def test_torchs_nccl_is_timed_until_it_has_finished(calls: list[Any]) -> None:
    contender = worker.connect("torch-nccl")
    assert isinstance(contender, Torchs)
    assert contender.version == f"NCCL 2.28.9 of torch {torch.__version__}, 2 GPUs: through sockets"
    assert calls == [1, (("nccl",), {"device_id": torch.device("cuda:1")})]
    x = torch.empty(TASK.count)
    worker.run(contender, Round(TASK, number=1, calls=2), Buffers(x, x))
    assert calls[2:] == ["barrier", "synchronize", "all_reduce", "synchronize"] * 3
    contender.device = "meta"  # no CUDA device exists here
    assert worker.buffers_of(contender, TASK).input.device.type == "meta"


def test_torchs_nccl_is_refused_where_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, nccl in ((False, True), (True, False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=cuda: found)
        monkeypatch.setattr(dist, "is_nccl_available", lambda found=nccl: found)
        with pytest.raises(UsageError, match="--peer torch-nccl needs a CUDA GPU and a torch bui"):
            peers.check("torch-nccl", "float32", "all_reduce")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    peers.check("torch-nccl", "bfloat16", "all_reduce")
