"""A trace of training: each unit's forward, backward, gathers, frees and reductions, and bytes
held."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import ringdp
from tests.ranks import on_ranks
from tests.tape.traces import TraceFile, read_trace

pytestmark = pytest.mark.process

STEPS = 3
UNITS = ("0", "1", "2")  # blocks; the root has a layer of its own


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in UNITS), nn.Linear(32, 1))


def train(comm: ringdp.Communicator, stage: int, path: Path) -> dict[str, int]:
    engine = ringdp.shard(net(), stage=stage, unit=Block, comm=comm)
    optimizer = torch.optim.AdamW(engine.model.parameters())
    before = [vars(o).copy() for o in (engine, engine.gathering, engine.ledger, *engine.units)]
    with ringdp.trace(path):
        for _ in range(STEPS):
            engine.model(torch.ones(4, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    after = [vars(o) for o in (engine, engine.gathering, engine.ledger, *engine.units)]
    # tracing leaves no attribute on the modules
    assert [b.keys() for b in before] == [a.keys() for a in after]
    held = engine.memory(optimizer)._asdict()
    engine.close()
    return held


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_every_span_of_a_step_is_recorded_in_order(
    comm: ringdp.Communicator, tmp_path: Path, stage: int
) -> None:
    path, rank = tmp_path / "run.json", comm.rank
    held = train(comm, stage, path)
    read = read_trace(comm, path)
    read.check_nesting()
    names = {
        kind: Counter(read.names(kind, rank))
        for kind in ("forward", "backward", "step", "finish", "reduce", "free")
    }
    units = ("root", *UNITS)
    assert read.names("forward", rank)[: len(units)] == [f"forward {unit}" for unit in units]
    backwards = ["backward root", *(f"backward {unit}" for unit in reversed(UNITS))]
    assert read.names("backward", rank)[: len(units)] == backwards
    for kind in ("forward", "backward", "reduce"):
        assert names[kind] == {f"{kind} {unit}": STEPS for unit in units}
    assert names["step"] == {"optimizer step": STEPS}
    assert names["finish"] == {"wait for reductions": STEPS}
    gathered = [read.names(k, rank) for k in ("gather", "prefetch")]
    uses = {0: 0, 2: len(units), 3: 2 * len(UNITS)}[stage]  # the last unit is not freed
    assert len(gathered[0]) + len(gathered[1]) == STEPS * uses
    assert names["free"].total() == STEPS * uses
    if stage == 3:
        assert set(names["free"]) == {f"free {unit}" for unit in units}
        assert len(gathered[1]) > len(gathered[0]) > 0
    check_memory(read, rank, held)
    (engine,) = read.about["parts"][str(rank)]["engines"]
    assert engine["stage"] == stage
    assert {k: engine["formula"][k] for k in held} == held


def check_memory(read: TraceFile, rank: int, held: dict[str, int]) -> None:
    counters = read.counters(rank)
    assert {e["name"] for e in counters} == {"memory of engine 0"}
    seen = [e["args"] for e in counters]
    most = {k: max(now[k] for now in seen) for k in seen[0]}
    most["buckets"] = max(now["gathered"] + now["buckets"] for now in seen) - most["gathered"]
    assert most == {
        "parameters": held["parameters"],
        "gathered": held["gathered_peak"],
        "gradients": held["gradients"],
        "buckets": held["buckets"],
        "optimizer": held["optimizer"],
    }


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_units_lie_in_a_root_without_parameters(
    comm: ringdp.Communicator, tmp_path: Path, stage: int
) -> None:
    """The model's output is its last unit's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in UNITS))
    engine = ringdp.shard(model, stage=stage, unit=nn.Linear, comm=comm)
    with ringdp.trace(path := tmp_path / "run.json"):
        for _ in range(STEPS):
            model(torch.ones(4, 8)).mean().backward()
    engine.close()
    read = read_trace(comm, path)
    read.check_nesting()
    names = [f"backward {unit}" for unit in ("root", *reversed(UNITS))]
    assert read.names("backward", comm.rank) == STEPS * names


@on_ranks(2)
def test_a_backward_that_raises_leaves_no_span_open(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    engine = ringdp.shard(net(), stage=3, unit=Block, comm=comm)

    def stop(_: torch.Tensor) -> None:
        raise RuntimeError("in the middle")

    with ringdp.trace(path := tmp_path / "run.json"):
        block = engine.model[1]
        handle = block.register_forward_hook(lambda _m, _i, out: out.register_hook(stop) and None)
        with pytest.raises(RuntimeError, match="in the middle"):
            engine.model(torch.ones(4, 32)).mean().backward()
        handle.remove()
        engine.model(torch.ones(4, 32)).mean().backward()
    engine.close()
    read = read_trace(comm, path)
    read.check_nesting()
    *_, forward = (s for s in read.spans("forward", comm.rank) if s["name"] == "forward root")
    (backward,) = (s for s in read.spans("backward", comm.rank) if s["name"] == "backward root")
    assert backward["ts"] >= forward["ts"] + forward["dur"]


@on_ranks(2)
def test_each_active_engine_has_its_own_memory_counter(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    """Three engines: one idle, two with optimizers that stepped before the trace."""
    idle, *busy = (ringdp.shard(net(), stage=3, unit=Block, comm=comm) for _ in range(3))
    optimizers = [
        torch.optim.AdamW(busy[0].model.parameters()),
        torch.optim.SGD(busy[1].model.parameters(), lr=0.1, momentum=0.9),
    ]

    def step() -> None:
        for engine, optimizer in zip(busy, optimizers, strict=True):
            engine.model(torch.ones(4, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    with ringdp.trace(path := tmp_path / "run.json"):
        step()
    held = [e.memory(o)._asdict() for e, o in zip(busy, optimizers, strict=True)]
    for engine in (idle, *busy):
        engine.close()
    read = read_trace(comm, path)
    engines = read.about["parts"][str(comm.rank)]["engines"]
    assert [e["optimizers"] for e in engines] == [["AdamW"], ["SGD"]]
    for traced, expected in zip(engines, held, strict=True):
        points = [e for e in read.counters(comm.rank) if e["name"] == traced["counter"]]
        first, *_, last = sorted(points, key=lambda e: e["ts"])
        kept = {k: expected[k] for k in ("parameters", "gradients", "optimizer")}
        assert {k: first["args"][k] for k in kept} == kept  # from the start of the trace
        assert first["ts"] < min(s["ts"] for s in read.spans("forward", comm.rank))
        assert set(last["args"].values()) == {0}


class OuterOptimizer(torch.optim.Optimizer):
    """Steps another optimizer, and keeps a copy of each parameter after it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.inner.step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["last"] = p.detach().clone()


@on_ranks(2)
def test_the_state_of_nested_optimizers_is_counted(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    engine = ringdp.shard(net(), stage=2, unit=Block, comm=comm)
    inner = torch.optim.SGD(engine.model.parameters(), lr=0.1, momentum=0.9)
    outer = OuterOptimizer(inner)
    with ringdp.trace(path := tmp_path / "run.json"):
        engine.model(torch.ones(4, 32)).mean().backward()
        outer.step()
    held = sum(engine.memory(o).optimizer for o in (inner, outer))
    engine.close()
    counters = read_trace(comm, path).counters(comm.rank)
    assert max(e["args"]["optimizer"] for e in counters) == held


@on_ranks(2)
def test_ddps_forwards_and_reductions_are_recorded(
    comm: ringdp.Communicator, tmp_path: Path
) -> None:
    model = ringdp.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ringdp.trace(path := tmp_path / "run.json"):
        for _ in range(STEPS):
            with model.no_sync():
                model(torch.ones(4, 32)).mean().backward()
            model(torch.ones(4, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    read = read_trace(comm, path)
    read.check_nesting()
    found = {
        kind: Counter(read.names(kind, comm.rank))
        for kind in ("forward", "backward", "reduce", "finish", "step")
    }
    assert found["forward"] == {"forward": 2 * STEPS}
    assert found["backward"] == {"backward": 2 * STEPS}
    assert found["reduce"]["reduce bucket 0"] == STEPS
    assert found["finish"] == {"wait for reductions": STEPS}
    assert found["step"] == {"optimizer step": STEPS}
    labels = [c["label"] for c in read.about["parts"][str(comm.rank)]["communicators"]]
    assert "gradients of DDP" in labels
