"""Models and training loops for comparing DistributedDataParallel with torch's: see
test_parity."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ringdp import DistributedDataParallel, ModelError
from tests.forks import store

WIDTH, ROWS = 12, 6

Wrap = Callable[..., Any]  # constructs a DistributedDataParallel


def rows(step: int, rank: int, part: int = 0, *shape: int) -> Tensor:
    seed = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
    return torch.randn(ROWS, *(shape or (WIDTH,)), generator=seed)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    )


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 5, 3, padding=1),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 4, 3),
            nn.BatchNorm2d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Transformer(nn.Module):
    """The head's weight is tied to the embedding's."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH, sparse=sparse)
        layer = nn.TransformerEncoderLayer(WIDTH, 3, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        if not sparse:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 7).long() % 17
        return self.head(self.encoder(self.embed(tokens))).mean(1)


class Branches(nn.Module):
    """Each forward uses one of three branches, a different one on each rank; `never` is never
    used."""

    def __init__(self, rank: int, *, differ: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.never = nn.Linear(WIDTH, 2)
        self.head = nn.Linear(WIDTH, 3)
        self.calls = rank if differ else 0
        self.step = int(differ)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.branches[self.calls % 3]
        self.calls += self.step
        return self.head(branch(self.stem(x)))


class Outputs(nn.Module):
    """Returns a dict with tuples, of which the loss uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"predictions": (self.a(x), self.b(x)), "note": None}


class Mixed(nn.Module):
    """Three dtypes, a frozen layer, a channels-last weight, a 0-dim and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).double()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.narrow = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.convolution = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(3, 2 * (WIDTH - 2)).t())
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x.double()).float()) * self.mask
        x = self.narrow(x.bfloat16()).float() * self.scale + self.empty.sum()
        x = x[:, None, None, :].expand(-1, 1, 3, -1)
        return self.convolution(x).flatten(1) @ self.transposed


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, twice: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.calls, self.reentrant = 1 + twice, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.last(x)


class NoGradient(torch.autograd.Function):
    """Has no gradient for its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class Straight(nn.Module):
    """Its `scale` is in the graph, but gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(self.inner(x), self.scale)


# ---- one iteration: from zero_grad to just before the optimizer's step


def loss(out: Tensor) -> Tensor:
    return cross_entropy(out.float(), torch.arange(len(out)) % 3)


def plain(net: nn.Module, step: int, rank: int) -> None:
    loss(net(rows(step, rank))).backward()


def images(net: nn.Module, step: int, rank: int) -> None:
    loss(net(rows(step, rank, 0, 2, 8, 8))).backward()


def accumulate(net: Any, step: int, rank: int) -> None:
    """Two micro-batches without reduction, then one that reduces all."""
    for part in range(3):
        with net.no_sync() if part < 2 else nullcontext():
            loss(net(rows(step, rank, part))).backward()


def accumulate_reduced(net: nn.Module, step: int, rank: int) -> None:
    """Every micro-batch is reduced, and added to the gradient so far."""
    for part in range(3):
        loss(net(rows(step, rank, part))).backward()


def autocast(net: nn.Module, step: int, rank: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = net(rows(step, rank))
    loss(out).backward()


def two_forwards(net: nn.Module, step: int, rank: int) -> None:
    (loss(net(rows(step, rank, 0))) + 2 * loss(net(rows(step, rank, 1)))).backward()


def one_of_two_outputs(net: nn.Module, step: int, rank: int) -> None:
    loss(net(rows(step, rank))["predictions"][1]).backward()


def each_output(net: nn.Module, step: int, rank: int) -> None:
    """Two backwards of one forward."""
    first, second = net(rows(step, rank))["predictions"]
    loss(first).backward()
    loss(second).backward()


def evaluated(net: nn.Module, step: int, rank: int) -> None:
    with torch.no_grad():
        net.eval()(rows(step, rank, 7, 2, 8, 8))
    net.train()
    images(net, step, rank)


def evaluated_inside(net: nn.Module, step: int, rank: int) -> None:
    """Evaluates between a forward and its backward."""
    out = net(rows(step, rank, 0, 2, 8, 8))
    with torch.no_grad():
        net.eval()(rows(step, rank, 7, 2, 8, 8))
    net.train()
    loss(out).backward()


class Case(NamedTuple):
    make: Callable[[int], nn.Module]  # rank -> model
    step: Callable[[Any, int, int], None] = plain
    options: dict[str, Any] = {}  # noqa: RUF012
    set_to_none: bool = True


UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
TINY = {"bucket_cap_mb": 0.001}

CASES = {
    "mlp": Case(lambda _: mlp()),
    "mlp, tiny buckets": Case(lambda _: mlp(), options=TINY),
    "mlp, a bucket each": Case(lambda _: mlp(), options={"bucket_cap_mb": 1e-6}),
    "mlp, zeroed in place": Case(lambda _: mlp(), set_to_none=False),
    "mlp, bucket views": Case(lambda _: mlp(), options={"gradient_as_bucket_view": True}),
    "mlp, static": Case(lambda _: mlp(), options=STATIC),
    "cnn with batch norm": Case(lambda _: CNN(), images),
    "cnn, own buffers": Case(lambda _: CNN(), images, {"broadcast_buffers": False}),
    "cnn, evaluated between": Case(lambda _: CNN(), evaluated),
    "cnn, evaluated before backward": Case(lambda _: CNN(), evaluated_inside),
    "cnn, channels last": Case(lambda _: CNN().to(memory_format=torch.channels_last), images),
    "tied transformer": Case(lambda _: Transformer()),
    "sparse embedding": Case(lambda _: Transformer(sparse=True)),
    "sparse, accumulated": Case(lambda _: Transformer(sparse=True), accumulate),
    "unused branches": Case(Branches, options=UNUSED),
    "unused branches, tiny buckets": Case(Branches, options=UNUSED | TINY),
    "unused branches, accumulated": Case(Branches, accumulate, UNUSED),
    "unused branches, accumulated reduced": Case(Branches, accumulate_reduced, UNUSED),
    "unused branches, zeroed in place": Case(Branches, options=UNUSED, set_to_none=False),
    "unused, static": Case(lambda rank: Branches(rank, differ=False), options=STATIC | TINY),
    "unused output": Case(lambda _: Outputs(), one_of_two_outputs, UNUSED),
    "a backward for each output": Case(lambda _: Outputs(), each_output),
    "accumulated": Case(lambda _: mlp(), accumulate),
    "accumulated, zeroed in place": Case(lambda _: mlp(), accumulate, set_to_none=False),
    "accumulated reduced": Case(lambda _: mlp(), accumulate_reduced),
    "autocast": Case(lambda _: mlp(), autocast),
    "autocast, tied transformer": Case(lambda _: Transformer(), autocast),
    "mixed dtypes, frozen, strides": Case(lambda _: Mixed()),
    "mixed dtypes, tiny buckets": Case(lambda _: Mixed(), options=TINY),
    "several forwards": Case(lambda _: mlp(), two_forwards),
    "checkpoint": Case(lambda _: Checkpointed(reentrant=False)),
    "checkpoint, reentrant": Case(lambda _: Checkpointed(reentrant=True)),
    "checkpoint, twice": Case(lambda _: Checkpointed(reentrant=False, twice=True)),
    "checkpoint, reentrant, twice": Case(
        lambda _: Checkpointed(reentrant=True, twice=True), options=STATIC
    ),
    "no gradient": Case(lambda _: Straight()),
    "no gradient, unused": Case(lambda _: Straight(), options=UNUSED),
    "no gradient, static": Case(lambda _: Straight(), options=STATIC),
    "compiled": Case(lambda _: torch.compile(mlp(), backend="aot_eager")),
}


TORCHS = nn.parallel.DistributedDataParallel
# With torch 2.11 a forward in evaluation mode writes to buffers that a backward still needs.
if not (NAMES_SYNCS := "forward_sync_buffers" in signature(TORCHS).parameters):
    del CASES["cnn, evaluated before backward"]
STEPS = 4
GROUPS = count()  # the groups that this rank has made


def gloo() -> None:
    """Makes gloo torch's default group over the pool's ranks, unless there is one.

    Each time with keys of its own: those of a group that was destroyed have its addresses.
    """
    if not dist.is_initialized():
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        part = dist.PrefixStore(f"gloo/{next(GROUPS)}", store())
        dist.init_process_group("gloo", store=part, rank=rank, world_size=size)


def ours_and_torchs(found: Callable[[Wrap], Any]) -> tuple[Any, Any]:
    """The results of `found` with our class and with torch's over gloo."""
    gloo()
    results = []
    for wrap in (DistributedDataParallel, TORCHS):
        torch.manual_seed(0)
        results.append(found(wrap))
    return results[0], results[1]


def dense(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def train(case: Case, wrap: Wrap, rank: int) -> tuple[list[Tensor | None], list[Tensor]]:
    """Every gradient of every step, and the model's state after each step."""
    torch.manual_seed(rank)  # rank 0's values are broadcast
    net = wrap(case.make(rank), **case.options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    gradients: list[Tensor | None] = []
    states: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        case.step(net, step, rank)
        gradients += [dense(p.grad) for p in net.parameters()]
        optimizer.step()
        states += [t.clone() for t in net.state_dict().values()]
    return gradients, states


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def backward(net: nn.Module, step: int, rank: int) -> list[Tensor]:
    net.zero_grad()
    loss(net(rows(step, rank))).backward()
    return gradients(net)


def error_text(attempt: Callable[[], object], kind: type[Exception] = ModelError) -> str:
    with pytest.raises(kind) as error:
        attempt()
    return str(error.value)
