"""Models that are awkward to shard: shared, frozen, nested, unused, tiny or structured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils.checkpoint import checkpoint

WIDTH = 11


def linear(n: int = WIDTH) -> nn.Linear:
    return nn.Linear(n, n)


def block() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


def freeze(module: nn.Module) -> Any:
    return module.requires_grad_(False)


class Fail(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError("on purpose")


class Chain(nn.Module):
    """A root parameter, then blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.ModuleList(blocks or [block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for b in self.blocks:
            x = self.call(b, x)
        return x

    def call(self, b: nn.Module, x: Tensor) -> Tensor:
        return x + b(x)


class Checkpointed(Chain):
    def __init__(self, *blocks: nn.Module, reentrant: bool) -> None:
        super().__init__(*blocks)
        self.reentrant = reentrant

    def call(self, b: nn.Module, x: Tensor) -> Tensor:
        return x + checkpoint(b, x, use_reentrant=self.reentrant)


class CalledAround(Checkpointed):
    """Calls one block before and after the others, which are checkpointed."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.blocks
        x = x * self.scale + first(x)
        for b in others:
            x = self.call(b, x)
        return x + first(x)


class CheckpointedWhole(nn.Module):
    """A checkpoint inside a unit, around a part of it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Chain(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


class CallsItself(nn.Sequential):
    """Of the layers of a block."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        first, between, last = self
        y = between(first(x))
        return last(self(y, depth - 1) if depth else y)


class Skips(Chain):
    """Block 1 is used in every other forward only; `never` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.rand(3))
        self.mixer = linear()  # only its weight is used
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = nn.functional.linear(x * self.scale, self.mixer.weight)
        for i, b in enumerate(self.blocks):
            if i != 1 or self.calls % 2:
                x = x + b(x)
        return x


class Skippable(nn.Module):
    """Returns its input: unchanged, or modified in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.used = linear(), True

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(torch.tanh(self.linear(x.clone()))) if self.used else x


class PassesOn(Chain):
    """Its blocks are skipped in turn, as with stochastic depth."""

    def __init__(self) -> None:
        super().__init__(*(Skippable() for _ in range(4)))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for i, b in enumerate(self.blocks):
            b.used = bool((self.calls + i) % 3)
        return super().forward(x)

    def call(self, b: nn.Module, x: Tensor) -> Tensor:
        return b(x)


class PartOfUnit(nn.Module):
    """Its second layer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class Detached(nn.Module):
    """Also uses its weight without a gradient, in an operation that is the last of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.detach()) @ self.weight


class Outer(nn.Module):
    """A unit around a unit; its first layer is frozen and runs before the inner unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = freeze(linear()), Detached(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(torch.tanh(self.first(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed((x[:, :4].abs() * 3).long() % 7)
        for b in self.blocks:
            y = y + b(y)
        return self.head(y)


class SharedInside(Chain):
    """One module inside two units."""

    def __init__(self) -> None:
        common = linear()
        super().__init__(
            nn.Sequential(linear(), common), block(), nn.Sequential(common, nn.Tanh(), linear())
        )


class Packed(nn.Module):
    """Returns what `pack` makes of two tensors."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.pack = linear(), linear(), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.a(x), torch.tanh(self.b(x)))


@dataclass
class Answer:
    y: Tensor
    more: Any = None


class Objects(nn.Module):
    """Returns a torch distribution; its blocks return objects of a foreign class."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            Packed(lambda a, b: SimpleNamespace(y=a, more=[SimpleNamespace(b=b)])) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Independent:
        for part in self.parts:
            out = part(x)
            x = x + out.y * out.more[0].b
        return Independent(Normal(x, self.scale.exp()), 1)


class LeavesInAttribute(Chain):
    """Leaves its result in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.y = super().forward(x)
        return self.y.detach()


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [
                Packed(lambda a, b: {"a": a, "rest": [b, None, 3]}),
                Packed(lambda a, b: (a, None, b)),
                Packed(lambda a, b: (a.detach(), b)),
            ]
        )

    def forward(self, x: Tensor) -> Answer:
        first = self.parts[0](x)
        second = self.parts[1](first["a"] * first["rest"][0])
        third = self.parts[2](second[0])
        return Answer(third[1] + second[2] + third[0], more={"nothing": None})


class Tiny(nn.Module):
    """Fewer elements than ranks; a 0-dim, an empty and a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.zero_dim = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, WIDTH).t())
        self.units = nn.ModuleList([nn.Linear(3, 1), nn.Linear(1, 1), nn.Linear(1, 33)])

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.zero_dim) @ self.transposed + self.empty.sum()
        for u in self.units:
            y = u(y)
        return y


class Guided(Chain):
    """Computes gradients during its forward, of each block's output with respect to its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for b in self.blocks:
            (by_input,) = torch.autograd.grad(b(x).square().sum(), x)
            x = x + b(x - by_input)
        return x * self.scale


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class GuidedByFrozen(Chain):
    """Computes a gradient during its forward through a checkpoint, for which autograd saves a
    frozen parameter itself, not a view."""

    def __init__(self) -> None:
        super().__init__(block(), freeze(Scale()), block())

    def forward(self, x: Tensor) -> Tensor:
        first, frozen, last = self.blocks
        x = first(x * self.scale)
        y = checkpoint(lambda x: torch.tanh(frozen(x)), x, use_reentrant=False)
        (by_input,) = torch.autograd.grad(y.square().sum(), x)
        return last(x - by_input)


class Unequal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = [(WIDTH, 200), (200, 1), (1, 1), (1, 300), (300, 2)]
        self.units = nn.ModuleList(nn.Linear(a, b) for a, b in wide)

    def forward(self, x: Tensor) -> Tensor:
        for u in self.units:
            x = torch.tanh(u(x))
        return x


def buffered() -> nn.Module:
    """Buffers of every kind, one of them in a dtype that collectives do not reduce."""
    net = Chain(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH)), block())
    net.register_buffer("mask", torch.rand(WIDTH) > 0.5)
    net.register_buffer("flag", torch.tensor(True))
    net.register_buffer("complex", torch.randn(2, 2, dtype=torch.complex64).t().conj())
    return net


def loss(out: Any) -> Tensor:
    if isinstance(out, Independent):
        return -out.log_prob(torch.ones(WIDTH)).mean()
    y: Tensor = out.y if isinstance(out, Answer) else out
    return y.float().square().mean()


def net(*blocks: nn.Module) -> Chain:
    torch.manual_seed(0)
    return Chain(*blocks)


def batch() -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
