"""The peak of stage 3, in storages that exist rather than in the engine's account: shards, the
root, two gathered units, one bucket, and what autograd has made of one unit's and the root's
gradients."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator

pytestmark = pytest.mark.process

WIDTH = 128  # a unit is far larger than all activations of one row together


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def storages() -> dict[int, int]:
    """Address -> bytes of every storage of floats made since the last gc.freeze()."""
    live = [o for o in gc.get_objects() if isinstance(o, Tensor) and o.is_floating_point()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live}


def peak(comm: Communicator, prefetch: int | None) -> tuple[int, int, int]:
    """The most bytes seen in a step beyond those at rest; a unit's; the root's."""
    gc.freeze()  # what there is by now is not looked at again, which would take most of the time
    model = Net()
    engine = ringdp.shard(model, stage=3, prefetch_bytes=prefetch, comm=comm)
    held: dict[int, int] = {}
    seen: list[int] = []

    def look(*_: object) -> None:
        _made = [p.grad for unit in engine.units for p in unit.computed]  # within Python's reach
        seen.append(sum(n for at, n in storages().items() if at not in held))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    for block in model.blocks:
        block.register_forward_pre_hook(look)
        block.register_forward_hook(look)
        block.register_forward_hook(lambda _m, _i, out: out.register_hook(look) and None)
    x = torch.ones(1, WIDTH)
    model(x).sum().backward()  # the order is learnt, the gradients are there
    model.zero_grad()
    held = storages()
    seen.clear()
    model(x).sum().backward()
    engine.close()
    gc.unfreeze()
    return max(seen), engine.units[1].bytes, engine.units[0].bytes


@pytest.mark.parametrize(("prefetch", "units"), [(None, 2), (0, 1), (3 << 16, 3)])
def test_stage_3_holds_what_it_says(ranks, prefetch, units):
    for most, unit, root in ranks(2)(peak, prefetch):
        activations = unit // 2  # some 30 rows of 512 bytes, far less
        made, bucket = unit + root, unit
        assert most <= root + units * unit + made + bucket + activations
        assert most >= root + units * unit
