"""What a plan says a rank holds and sends is what the engine counts, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator
from ringdp.cli.plan.models import of_module
from ringdp.cli.plan.stages import held
from ringdp.parallel.memory import traffic
from ringdp.parallel.prefetch import one_unit
from ringdp.parallel.stages import stage_of
from tests.cli.plan.models_here import WIDTH, net

pytestmark = pytest.mark.process

PRECISIONS = {
    "fp32": ringdp.Precision(),
    "bf16": ringdp.Precision(param=torch.bfloat16),
    "bf16, reduced in fp32": ringdp.Precision(param=torch.bfloat16, reduce=torch.float32),
}


class Runs(nn.Module):
    """`net`, with a forward."""

    def __init__(self) -> None:
        super().__init__()
        made = net()
        self.embed, self.blocks = made.embed, made.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.embed
        for block in self.blocks:
            x = x + block(x)
        return x


def one_step(comm: Communicator, stage: int, precision: str) -> tuple[Any, int]:
    torch.manual_seed(0)
    model = Runs()
    engine = ringdp.shard(model, stage=stage, precision=PRECISIONS[precision], comm=comm)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained)
    before = engine.sent_bytes()
    model(torch.randn(4, WIDTH)).float().square().mean().backward()
    optimizer.step()
    found = engine.memory(optimizer), engine.sent_bytes() - before
    engine.close()
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_a_plan_are_the_engines(ranks, stage, precision):
    with torch.device("meta"):
        model = of_module("Runs", Runs(), PRECISIONS[precision])
    how = stage_of(stage)
    sizes = [w.compute * u.padded for u, w in zip(model.layout(2), model.widths, strict=True)]
    limit = one_unit(sizes, model.groups)
    sends = traffic(model.layout(2), model.groups, how, widths=model.widths, limit=limit)
    memory, sent = ranks(2)(one_step, stage, precision)[0]
    assert memory == held(model, stage, 2, yields=True)
    assert sent == sends
