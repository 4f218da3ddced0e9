"""The bytes that a plan predicts for a rank to hold and send equal what the engine counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator
from ringdp.cli.plan.hardware import Network
from ringdp.cli.plan.models import of_module
from ringdp.cli.plan.stages import Setting, row
from ringdp.schedule.cost import Machine
from tests.cli.plan.models_here import WIDTH, net

pytestmark = pytest.mark.process

PRECISIONS = {
    "fp32": ringdp.Precision(),
    "bf16": ringdp.Precision(param=torch.bfloat16),
    "bf16, reduced in fp32": ringdp.Precision(param=torch.bfloat16, reduce=torch.float32),
}


class Runs(nn.Module):
    """`net` with a forward."""

    def __init__(self) -> None:
        super().__init__()
        made = net()
        self.embed, self.blocks = made.embed, made.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.embed
        for block in self.blocks:
            x = x + block(x)
        return x


NETWORKS = {
    "shared memory": (None, Network(Machine(1e-6, 1e-9, 0), "", yields=True)),
    "link": (ringdp.Link(latency=1e-6, bandwidth=1e9), Network(Machine(1e-6, 1e-9, 0), "")),
}


def one_step(job: Communicator, stage: int, precision: str, network: str) -> tuple[Any, int]:
    torch.manual_seed(0)
    link, _ = NETWORKS[network]
    comm = job if link is None else ringdp.init(link=link)
    model = Runs()
    engine = ringdp.shard(model, stage=stage, precision=PRECISIONS[precision], comm=comm)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained)
    before = engine.sent_bytes()
    model(torch.randn(4, WIDTH)).float().square().mean().backward()
    optimizer.step()
    found = engine.memory(optimizer), engine.sent_bytes() - before
    engine.close()
    if comm is not job:
        comm.close()
    return found


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_a_plan_equal_the_engines(ranks, stage, precision, network):
    with torch.device("meta"):
        model = of_module("Runs", Runs(), PRECISIONS[precision])
    over = NETWORKS[network][1]
    setting = Setting(2, 4, 1 << 20, flops=1e9, bandwidth=1e9, network=over, within=over)
    plan = row(model, stage, setting)
    assert ranks(2)(one_step, stage, precision, network)[0] == (plan.memory, plan.sent)
