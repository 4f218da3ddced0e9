"""Copies between a GPU and the host run concurrently with the GPU's work, and end before the host
reads them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringdp
from ringdp.parallel.reducing import Reducing, _Turn
from ringdp.parallel.stages import STAGES
from ringdp.parallel.state import State
from ringdp.parallel.unit import FlatUnit


class Stream:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def synchronize(self) -> None:
        self._events.append("the host waits")


class Bucket:
    is_cuda, device, nbytes = True, torch.device("cuda", 0), 4

    def __getitem__(self, part: slice) -> Bucket:
        return self


def record_copies(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Sends copies to a stream that records when it is waited for."""
    streams = {Bucket.device: Stream(events)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)


def test_only_the_end_of_backward_waits_for_copies_to_the_host(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the GPU would idle after every unit, as the host launches nothing while it
    waits."""
    events = list[str]()
    bucket = Bucket()
    record_copies(monkeypatch, events)
    work = SimpleNamespace(wait=lambda: None)
    comm: Any = SimpleNamespace(reduce_scatter=lambda *_, **__: work)
    ledger: Any = SimpleNamespace(give=lambda *_: None)
    reducing = Reducing(comm, ledger)
    for index in range(2):
        copy = SimpleNamespace(is_cuda=False, copy_=lambda _, non_blocking: events.append("copied"))
        gradients = SimpleNamespace(bucket=None, reduced=copy)
        cut = SimpleNamespace(part=slice(1), keeps=slice(1))
        widths = SimpleNamespace(own=False)
        unit: Any = SimpleNamespace(
            index=index, cut=cut, gradients=gradients, stage=STAGES[3], widths=widths
        )
        reducing._open[index] = SimpleNamespace(whole=lambda: bucket)  # type: ignore[assignment]
        reducing._turns[index] = _Turn(unit, keep=False, accumulate=False, shows=[])
        reducing.start(unit)
    reducing.finish()
    assert events == ["copied", "copied", "the host waits"]


def gather_from_the_host() -> Any:
    """The stream that reads a unit's master on the host, as recorded by its gather."""
    copied = SimpleNamespace(copy_=lambda _, non_blocking: None)
    unit: Any = SimpleNamespace(
        state=State.SHARDED,
        settle=lambda: None,
        index=0,
        is_stale=lambda: False,
        piece=SimpleNamespace(gather=lambda *_: None),
        freed=False,
        slices=True,
        apart=True,
        full=SimpleNamespace(data=Bucket()),
        shard=SimpleNamespace(data=copied),
        master=None,
        plan=SimpleNamespace(padded=0),
        ledger=SimpleNamespace(offload=ringdp.Offload(optimizer=True)),
        reader=None,
        gathered=[],
        _versions=list,
    )
    no_comm: Any = None
    FlatUnit.gather(unit, no_comm)
    return unit.reader


def test_a_step_waits_for_gathers_that_read_its_masters(monkeypatch: pytest.MonkeyPatch):
    """For instance gathers of an evaluation between backward and step, when the host is ahead of
    its GPU."""
    events = list[str]()
    record_copies(monkeypatch, events)
    with ringdp.init() as comm:
        model = torch.nn.Linear(4, 4)
        engine = ringdp.shard(model, stage=3, comm=comm)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: events.append("the step"))
        model(torch.ones(4)).sum().backward()
        unit: Any = engine.units[0]
        unit.reader = gather_from_the_host()
        optimizer.step()
        engine.close()
    assert events == ["the host waits", "the step"]


def test_a_load_waits_for_gathers_that_read_its_masters(tmp_path: Path):
    with ringdp.init() as comm:
        model = torch.nn.Linear(4, 4)
        engine = ringdp.shard(model, stage=3, comm=comm)
        ringdp.save(tmp_path, engine)
        with engine.full_parameters(write=True):
            torch.nn.init.ones_(model.weight)
        unit: Any = engine.units[0]
        before, read = unit.master.clone(), list[torch.Tensor]()
        unit.reader = SimpleNamespace(synchronize=lambda: read.append(unit.master.clone()))
        ringdp.load(tmp_path, engine)
        assert not torch.equal(unit.master, before)
        engine.close()
    (found,) = read
    assert torch.equal(found, before)
