"""Checkpoints of several optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ringdp
from ringdp import CheckpointError, Communicator, UsageError
from tests.parallel.checkpoint.test_checkpoint import loss, net

pytestmark = pytest.mark.process


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    ps = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in ps if (p.dim() == 2) == muon] for muon in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


def train_with_both(comm: Communicator, stage: int, path: str, loads: bool) -> list[float]:
    """The losses of steps 2 and 3, the second half of a run that was saved amid."""
    model = net()
    engine = ringdp.shard(model, stage=stage, comm=comm)
    both = muon_and_adamw(model)
    losses = []
    for at in range(2 * loads, 4):
        if at == 2 and loads:
            ringdp.load(path, engine, both)
        elif at == 2:
            ringdp.save(path, engine, tuple(both))
        model.zero_grad()
        value = loss(model, at)
        value.backward()
        for optimizer in both:
            optimizer.step()
        losses.append(value.item())
    if loads:
        for several, message in (
            (both[::-1], "optimizer is Muon, AdamW, not AdamW, Muon"),
            (both[0], "optimizer is Muon, AdamW, not Muon"),
        ):
            with pytest.raises(CheckpointError, match=message):
                ringdp.load(path, engine, several)
        with pytest.raises(UsageError, match="two optimizers have the same parameter"):
            ringdp.save(path, engine, [both[0], both[0]])
        with pytest.raises(UsageError, match="optimizer is a int; allowed: "):
            ringdp.save(path, engine, [both[0], 1])
    engine.close()
    return losses[-2:]


@pytest.mark.parametrize(("wrote", "reads"), [((2, 3), (2, 1)), ((1, 0), (2, 3))])
def test_several_optimizers_go_on_as_without_a_save(ranks, tmp_path, wrote, reads) -> None:
    (exact, *_), (found, *_) = (
        ranks(n)(train_with_both, stage, str(tmp_path), bool(loads))
        for loads, (n, stage) in enumerate((wrote, reads))
    )
    assert found == pytest.approx(exact, rel=1e-5)
