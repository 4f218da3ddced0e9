"""Modules that return parameters or parts of them, or leave them in attributes, and buffers that
repeat an element. The reference is one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import Communicator, Engine, UsageError
from tests.equal import equal
from tests.parallel.small import COMPUTE_IN_FLOAT64
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

ROWS, WIDTH = 4, 6


class Pair(NamedTuple):
    t: Any
    other: int = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    t: Any


class Nested:
    def __init__(self, t: Tensor) -> None:
        self.inner = [SimpleNamespace(t={"t": t}), Frozen(1)]
        self.itself = self

    @property
    def t(self) -> Tensor:
        out: Tensor = self.inner[0].t["t"]
        return out


PARTS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda p: p,
    "a part": lambda p: p[:ROWS],
    "transposed": lambda p: {"t": p.t()},
    "detached": lambda p: p.detach()[:ROWS],
    "in a tuple with names": Pair,
    "in a dataclass": Frozen,
    "in an object": SimpleNamespace,
    "in objects within objects": Nested,
    "in a set": lambda p: {p},
    "in a function": lambda p: lambda: p * 1,
    "as an argument": lambda p: partial(torch.mul, p, 1),
    "in an iterator": lambda p: iter([p]),
    "row by row": lambda p: (row * 1 for row in p),
}
UNSEEN = {"in a function", "as an argument", "in an iterator", "row by row"}


def table_of(returned: Any) -> Tensor:
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, dict):
        return table_of(returned["t"].t())
    if callable(returned):
        return table_of(returned())
    if hasattr(returned, "t"):
        return table_of(returned.t)
    rows = list(returned)
    return torch.stack(rows) if len(rows) > 1 else table_of(rows[0])


class Table(nn.Module):
    """Returns its parameter, as positional embeddings do."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.part = part

    def forward(self) -> Any:
        make = PARTS[self.part]
        return make(t=self.table) if make is SimpleNamespace else make(self.table)


class Net(nn.Module):
    def __init__(self, part: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = Table(part), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("repeats", torch.rand(1, WIDTH).expand(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = table_of(self.table())
        out: Tensor = self.linear(torch.tanh(x + rows * rows)) * self.repeats
        return out


def batch(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(net: nn.Module, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    outputs = []
    for step in range(steps):
        with torch.no_grad():
            outputs.append(net(batch(step)))
        out = net(batch(step))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(out.detach())
    return outputs


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_a_unit_can_return_its_parameter(comm: Communicator, stage: int, part: str) -> None:
    """Such a parameter must not be a view of freed memory."""
    for precision in (None, COMPUTE_IN_FLOAT64):
        net, twin = Net(part), Net(part)
        if precision:
            twin.double()
        engine = ringdp.shard(
            net, stage=stage, unit=(Table, nn.Linear), precision=precision, comm=comm
        )
        if stage == 3 and part in UNSEEN:
            with pytest.raises(UsageError, match="unit 'table' returns"):
                train(net)
            engine.close()
            continue
        # exact for n = 2 and equal batches, except with masters in another dtype
        torch.testing.assert_close(train(net), train(twin), rtol=1e-6 if precision else 0, atol=0)
        for p in net.parameters():
            assert len(p._backward_hooks) == 1, "one hook, however many forwards"
        engine.close()


class ReturnsParameter(nn.Module):
    """The parameter belongs to the root, which is freed after a forward without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.ones(ROWS, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), self.table[1:], self.table


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_returned_parameters_keep_their_values(comm: Communicator, stage: int) -> None:
    net = ReturnsParameter()
    engine = ringdp.shard(net, stage=stage, comm=comm)
    with torch.inference_mode():
        _, part, table = net(batch(0))
    assert part.tolist() == [[1.0] * WIDTH] * (ROWS - 1)
    assert table.tolist() == [[1.0] * WIDTH] * ROWS
    with engine.full_parameters():
        state = net.state_dict()
        twin = {k: v.clone() for k, v in state.items()}
    assert all(torch.equal(state[k], v) for k, v in twin.items())
    engine.close()


@on_ranks(2)
def test_an_expanded_buffer_gets_rank_0s_values(comm: Communicator, tmp_path: Path) -> None:
    net = Net("itself")
    with torch.no_grad():
        net.repeats[0] = comm.rank + 1
    engine: Engine = ringdp.shard(net, stage=3, comm=comm)
    assert net.repeats.tolist() == [[1.0] * WIDTH] * ROWS, "rank 0's values"
    ringdp.save(tmp_path, engine)
    net.repeats[0] = 7
    ringdp.load(tmp_path, engine)
    assert net.repeats.tolist() == [[1.0] * WIDTH] * ROWS
    engine.close()


class InAThread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: torch.tanh(self.linear(x))).result()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_unit_may_compute_in_a_thread(comm: Communicator, stage: int) -> None:
    """Autograd numbers the operations of every thread by themselves."""
    torch.manual_seed(0)
    net, twin = (nn.Sequential(*(InAThread() for _ in range(3))) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    engine = ringdp.shard(net, stage=stage, unit=InAThread, comm=comm)
    assert equal(train(net), train(twin))
    engine.close()


# ---- what is left in attributes


class LeavesLosses(nn.Module):
    """Its auxiliary loss is computed after its output, so its backward comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._losses: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        out = x + torch.tanh(self.linear(x))
        self._parts = self.linear.weight[:2], self.linear.weight.detach()[:1].t()
        self._losses["large"] = self.linear.weight.square().sum() + out.mean()
        self.small = self.linear.bias.square().sum() if x[0, 0] > 0 else None
        return out


def losses_left(model: nn.Module) -> Tensor:
    loss = torch.zeros(())
    for m in model:
        loss = loss + m._losses["large"] + (0 if m.small is None else m.small)
        loss = loss + torch.stack([part.sum() for part in m._parts]).sum()
    return loss


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_losses_left_in_attributes_are_trained(comm: Communicator, stage: int) -> None:
    """In stage 3 the loss's backward needs gathered weights."""
    torch.manual_seed(0)
    net, twin = (nn.Sequential(*(LeavesLosses() for _ in range(3))) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    engine = ringdp.shard(net, stage=stage, comm=comm)
    for model in (net, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with torch.no_grad():
                model(batch(step))
            loss = model(batch(step)).square().mean() * (step != 1) + losses_left(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with engine.full_parameters():
        for mine, exact in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, exact)
    assert engine.ledger.now["gathered"] == 0
    engine.close()


class Leaves(nn.Module):
    """Leaves a tensor in an attribute, besides what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.left = y * 2
        return y


class ReturnsLeft(nn.Module):
    """Runs another unit and leaves what that left, or returns what it left before."""

    def __init__(self, leaves: Leaves, *, inside: bool) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), leaves if inside else None
        self.leaves = [leaves]  # not a module of this one

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.inner is None:
            return self.leaves[0].left
        out = self.inner(y)
        self.left = self.inner.left
        return out + self.left


def nested() -> nn.Module:
    torch.manual_seed(0)
    leaves = Leaves()
    return nn.Sequential(
        Leaves(), ReturnsLeft(leaves, inside=True), ReturnsLeft(leaves, inside=False), Leaves()
    )


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_unit_may_return_what_another_has_left(comm: Communicator, stage: int) -> None:
    """It is an output of the units that had it first: no other's backward begins there."""
    net, twin = nested(), nested()
    engine = ringdp.shard(net, stage=stage, unit=(Leaves, ReturnsLeft), comm=comm)
    assert equal(train(net), train(twin))
    engine.close()
