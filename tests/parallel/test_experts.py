"""Ranks have gradients of different parameters, as with mixtures of experts. The reference is one
process with the batches of all ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringdp
from ringdp import Communicator, Precision
from tests.comm.failing import by_turns
from tests.parallel.small import COMPUTE_IN_FLOAT64, WIDTH, assert_equal, loss
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

Picks = list[int | None]  # per layer: the expert used, or None for all


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.pick: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        picked = self.experts if self.pick is None else [self.experts[self.pick]]
        return x + torch.tanh(torch.stack([e(x) for e in picked]).sum(0))


class Block(Experts):
    """Its own layer finishes backward after its experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([Experts()])

    def forward(self, x: Tensor) -> Tensor:
        self.experts[0].pick = self.pick  # type: ignore[assignment]
        out: Tensor = self.experts[0](torch.tanh(self.first(x)))
        return out


class Residual(Block):
    """Its own backward starts before that of its experts, and may finish before or after it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Around(Experts):
    """A unit inside it runs before its experts, so their backward finishes first, except where a
    rank leaves some out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Net(nn.Module):
    """Calls each layer once, one of them `again`, or under a checkpoint; or has nested units
    (`within`, `residual`, `around`)."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = {"within": Block, "residual": Residual, "around": Around}.get(variant, Experts)
        self.layers, self.variant = nn.ModuleList(kind() for _ in range(3)), variant

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.layers
        for layer in (c, a, b, a) if self.variant == "again" else (c, a, b):
            if "reentrant" in self.variant:
                x = checkpoint(layer, x.requires_grad_(), use_reentrant=self.variant == "reentrant")
            else:
                x = layer(x)
        return x

    def choose(self, picks: Picks) -> None:
        for layer, pick in zip(self.layers, picks, strict=True):
            layer.pick = pick  # type: ignore[assignment]


VARIANTS = ("once", "again", "reentrant", "not reentrant", "within", "residual", "around")
PICKS = [[[0, 1, None], [1, 1, 0]], [[None, 0, 0], [1, 1, 0]], [[1, None, 0], [None, 1, 0]]]


@pytest.mark.parametrize(
    ("variant", "stage", "precision", "picks"),
    by_turns(product(VARIANTS, range(4), (None, COMPUTE_IN_FLOAT64)), PICKS),
)
@on_ranks(2)
def test_ranks_can_use_different_experts(
    comm: Communicator, variant: str, stage: int, precision: Precision | None, picks: list[Picks]
) -> None:
    """Without a common order, ranks would wait for each other's reductions in a circle."""
    model, twin = Net(variant), Net(variant)
    engine = ringdp.shard(model, stage=stage, unit=Experts, precision=precision, comm=comm)
    mine, exact = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    for step in range(3):
        model.choose(picks[comm.rank])
        loss(model, step).backward()
        mine.step()
        mine.zero_grad()
        for one in picks:
            twin.choose(one)
            (loss(twin, step) / len(picks)).backward()
        exact.step()
        exact.zero_grad()
    assert_equal(engine, twin)
    engine.close()
