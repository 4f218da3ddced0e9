"""Lists and dicts passed to a module, which puts something into them, such as an auxiliary loss,
while their tensors are cast. The reference is one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import ringdp
from ringdp import Communicator, DistributedDataParallel, Precision
from ringdp.parallel.values.inputs import cast, give_back
from tests.parallel.ddp.cases import gloo
from tests.parallel.small import COMPUTE_IN_FLOAT64, WIDTH, assert_equal, batch
from tests.ranks import on_ranks


def test_changes_of_copies_are_made_to_the_originals():
    inner = ["float"]
    items = {"a": "float", "b": "int", "inner": inner}
    copied = {"a": "cast", "b": "int", "inner": ["cast"]}
    back = give_back(((items,), {"again": inner}), ((copied,), {"again": ["cast"]}))
    copied["inner"].append("new")
    copied["c"] = copied["inner"]
    del copied["b"]
    back()
    assert inner == ["float", "new"]
    assert items == {"a": "float", "inner": inner, "c": inner}
    assert items["c"] is items["inner"] is inner


class Block(nn.Module):
    """Its loss is computed from its weights after its output, so the loss's backward comes
    first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, losses: list[Tensor], *, seen: dict[str, Any]) -> Tensor:
        out = torch.tanh(self.linear(x))
        losses.append(self.router(out).logsumexp(-1).mean().float())
        seen["calls"] = seen.get("calls", 0) + 1
        seen.setdefault("parts", []).append(self.router.weight.detach()[:1])
        return out


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, losses: list[Tensor], seen: dict[str, Any]) -> Tensor:
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, losses, seen=seen, use_reentrant=False)
            else:
                x = block(x, losses, seen=seen)
        return x


def call(model: nn.Module) -> Tensor:
    losses, seen = [batch().mean()], {"x": batch()}
    given = losses[0], seen["x"]
    out = model(batch(), losses, seen).square().mean()
    assert losses[0] is given[0]
    assert seen["x"] is given[1]
    assert len(losses) == 4
    assert seen["calls"] == len(seen["parts"]) == 3
    assert all(part.isfinite().all() for part in seen["parts"])
    return out + sum(losses)


@pytest.mark.process
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("precision", [None, COMPUTE_IN_FLOAT64], ids=["as built", "cast"])
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_losses_in_a_list_are_trained(
    comm: Communicator, stage: int, precision: Precision | None, checkpointed: bool
) -> None:
    """FSDP's casts lose such losses; in stage 3 their backward needs gathered weights."""
    model, twin = Net(checkpointed=checkpointed), Net(checkpointed=False)
    engine = ringdp.shard(
        model, stage=stage, precision=precision, unit=Block, prefetch_bytes=0, comm=comm
    )
    for one in (model, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            call(one).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(engine, twin)
    engine.close()


@pytest.mark.process
@on_ranks(1)
def test_losses_in_a_list_are_kept_by_ddp(comm: Communicator) -> None:
    gloo()
    precision = _MixedPrecision(param_dtype=torch.bfloat16)
    call(DistributedDataParallel(Net(checkpointed=False), mixed_precision=precision)).backward()


class RaisesOnce(nn.Linear):
    def forward(self, x: Tensor, seen: list[Any]) -> Tensor:
        seen.append("seen")
        if len(seen) == 2:
            raise ValueError("a second one")
        return super().forward(x)


@pytest.mark.process
@on_ranks(1)
def test_a_forward_that_raises_gives_back_its_changes(comm: Communicator) -> None:
    engine = ringdp.shard(
        model := RaisesOnce(WIDTH, 1), stage=3, precision=COMPUTE_IN_FLOAT64, comm=comm
    )
    seen = [batch()]
    with pytest.raises(ValueError, match="a second one"):
        model(batch(), seen)
    assert seen[1:] == ["seen"]
    model(batch(), seen).sum().backward()
    assert seen[1:] == ["seen"] * 2
    engine.close()


def test_one_list_in_two_places_is_copied_once():
    losses = [batch().double()]
    given = (losses, {"again": losses}), {}
    passed = cast(given, torch.float32)
    assert passed[0][0] is passed[0][1]["again"] is not losses
    back = give_back(given, passed)
    passed[0][0].append("a")
    passed[0][1]["again"].append("b")
    back()
    assert losses[1:] == ["a", "b"]


def test_reused_addresses_of_dropped_casts_are_not_confused():
    given = ([batch().double(), batch().double()],)
    passed = cast(given, torch.float32)
    back = give_back(given, passed)
    (inner,) = passed
    del passed
    for i in range(2):
        inner[i] = None  # a new object may then get the address of a deleted one
        inner.append(torch.zeros(4, WIDTH))
    new = inner[2:]
    back()
    assert all(a is b for a, b in zip(given[0][2:], new, strict=True))


class Recursive(nn.Module):
    """Puts one loss into a list and keeps another, before it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, losses: list[Any], depth: int = 2) -> Tensor:
        for place in (losses, self.kept):
            place.append(self.router(x).logsumexp(-1).mean())
        x = torch.tanh(self.linear(x))
        return self(x, losses, depth - 1) if depth else x


@pytest.mark.process
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_recursive_unit_can_leave_losses_at_every_depth(comm: Communicator, stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Recursive())
    twin = copy.deepcopy(model)
    engine = ringdp.shard(model, stage=stage, unit=Recursive, prefetch_bytes=0, comm=comm)
    for one in (model, twin):
        losses: list[Any] = []
        losses.append(losses)  # the list contains itself
        one[0](batch(), losses)
        (torch.stack(losses[1:]).sum() + torch.stack(one[0].kept).sum()).backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert_equal(engine, twin)
    engine.close()
