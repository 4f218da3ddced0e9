"""Gradients on their way from a GPU to the host: beside the backward, and there at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringdp.parallel.reducing import Reducing
from ringdp.parallel.stages import STAGES


class Stream:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def synchronize(self) -> None:
        self._events.append("the host waits")


class Bucket:
    is_cuda, device, nbytes = True, torch.device("cuda", 0), 4

    def __getitem__(self, part: slice) -> Bucket:
        return self


def test_only_the_end_of_backward_waits_for_copies_to_the_host(monkeypatch: pytest.MonkeyPatch):
    """Else the GPU would run dry after every unit, since the host launches nothing meanwhile."""
    events = list[str]()
    stream, bucket = Stream(events), Bucket()
    monkeypatch.setattr(torch.cuda, "current_stream", {bucket.device: stream}.__getitem__)
    work = SimpleNamespace(wait=lambda: None)
    comm: Any = SimpleNamespace(reduce_scatter=lambda *_, **__: work)
    ledger: Any = SimpleNamespace(give=lambda *_: None)
    reducing = Reducing(comm, STAGES[3], ledger)
    for index in range(2):
        copy = SimpleNamespace(is_cuda=False, copy_=lambda _, non_blocking: events.append("copied"))
        unit: Any = SimpleNamespace(index=index, bucket=None, part=slice(1), gradient=copy)
        filling = SimpleNamespace(whole=lambda: bucket)
        reducing._open[index] = SimpleNamespace(filling=filling)  # type: ignore[assignment]
        reducing._accumulate[index] = False
        reducing.start(unit)
    reducing.finish()
    assert events == ["copied", "copied", "the host waits"]
