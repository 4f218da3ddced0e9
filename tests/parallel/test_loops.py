"""What training loops do to an engine: every case gives the gradients of one process, the same bits
in every stage on every rank, and leaves nothing gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringdp
from ringdp import Communicator
from ringdp.parallel.unit import State

pytestmark = pytest.mark.process

WIDTH, ROWS, STEPS = 11, 5, 3

Batches = Callable[[int], Tensor]  # this step's micro-batches on this rank


def linear(n: int = WIDTH) -> nn.Linear:
    return nn.Linear(n, n)


def block() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


def freeze(module: nn.Module) -> Any:
    return module.requires_grad_(False)


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


class CheckpointedWhole(nn.Module):
    """The checkpoint lies inside a unit, around a part of it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Chain(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


class Skips(Chain):
    """Block 1 is used in every other forward only, and `never` has no use at all."""

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


class PartOfUnit(nn.Module):
    """Its second layer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class Detached(nn.Module):
    """Uses its weight once more without a gradient, in an op whose backward is its last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.detach()) @ self.weight


class Outer(nn.Module):
    """A unit around a unit; its first layer is frozen and runs before the inner one."""

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


class Answers(nn.Module):
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


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [
                Answers(lambda a, b: {"a": a, "rest": [b, None, 3]}),
                Answers(lambda a, b: (a, None, b)),
                Answers(lambda a, b: (a.detach(), b)),
            ]
        )

    def forward(self, x: Tensor) -> Answer:
        first = self.parts[0](x)
        second = self.parts[1](first["a"] * first["rest"][0])
        third = self.parts[2](second[0])
        return Answer(third[1] + second[2] + third[0], more={"nothing": None})


class Tiny(nn.Module):
    """Fewer elements than ranks, a 0-dim, an empty and a transposed parameter."""

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
    """Buffers of every kind, one of them in a dtype that no collective reduces."""
    net = Chain(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH)), block())
    net.register_buffer("mask", torch.rand(WIDTH) > 0.5)
    net.register_buffer("flag", torch.tensor(True))
    net.register_buffer("complex", torch.randn(2, 2, dtype=torch.complex64).t())
    return net


def loss(out: Any) -> Tensor:
    y: Tensor = out.y if isinstance(out, Answer) else out
    return y.float().square().mean()


# What one iteration does: everything from zero_grad to the optimizer's step.


def plain(net: nn.Module, x: Batches) -> None:
    loss(net(x(0))).backward()


def micro_batches(net: nn.Module, x: Batches) -> None:
    for i in range(3):
        loss(net(x(i))).backward()


def two_forwards(net: nn.Module, x: Batches) -> None:
    (loss(net(x(0))) + 2 * loss(net(x(1)))).backward()


def two_backwards(net: nn.Module, x: Batches) -> None:
    first, second = loss(net(x(0))), loss(net(x(1)))
    first.backward()
    second.backward()


def backwards_reversed(net: nn.Module, x: Batches) -> None:
    first, second = loss(net(x(0))), loss(net(x(1)))
    second.backward()
    first.backward()


def retained(net: nn.Module, x: Batches) -> None:
    one = loss(net(x(0)))
    one.backward(retain_graph=True)
    one.backward()


def assigned(net: nn.Module, x: Batches) -> None:
    """New tensors in .grad between micro-batches, and one gradient taken away."""
    loss(net(x(0))).backward()
    for p in net.parameters():
        p.grad = None if p.grad is None else p.grad * 0.5
    next(net.parameters()).grad = None
    loss(net(x(1))).backward()


def evaluated(net: nn.Module, x: Batches) -> None:
    """Evaluation at every place, in every mode."""
    with torch.no_grad():
        net(x(5))
    one = loss(net(x(0)))
    with torch.inference_mode():
        net.eval()(x(6))
    net.train()
    one.backward()
    net(x(7))  # with gradients, and no backward


def forward_raises(net: nn.Module, x: Batches) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    loss(net(x(0))).backward()
    handle = list(net.modules())[-2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        net(x(1))
    handle.remove()


def backward_raises(net: nn.Module, x: Batches) -> None:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    blocks: Any = net.get_submodule("blocks")
    handle = blocks[1].register_forward_pre_hook(lambda _m, inputs: Fail.apply(inputs[0]))
    with pytest.raises(RuntimeError, match="on purpose"):
        loss(net(x(1))).backward()
    handle.remove()
    net.zero_grad()
    loss(net(x(0))).backward()


def input_gradient(net: nn.Module, x: Batches) -> None:
    leaf = x(0).requires_grad_()
    (g,) = torch.autograd.grad(loss(net(leaf)), leaf)
    loss(net(x(1) + g)).backward()


def bfloat16() -> nn.Module:
    return Chain().bfloat16()


class Case(NamedTuple):
    make: Callable[[], nn.Module] = Chain
    step: Callable[[nn.Module, Batches], None] = plain
    unit: Any = None
    dtype: torch.dtype = torch.float32


def shared_twice() -> nn.Module:
    b = block()
    return Chain(b, block(), b)


CASES = {
    "chain": Case(),
    "unused": Case(Skips),
    "unused, micro-batches": Case(Skips, micro_batches),
    "unused part of a unit": Case(lambda: Chain(block(), PartOfUnit(), block())),
    "frozen first layer": Case(
        lambda: Chain(*(nn.Sequential(freeze(linear()), nn.Tanh(), linear()) for _ in range(2)))
    ),
    "frozen unit": Case(lambda: Chain(block(), freeze(block()), block(), freeze(block()))),
    "frozen, called twice": Case(lambda: (lambda b: Chain(b, block(), b))(freeze(block()))),
    "detached use": Case(lambda: Chain(*(Detached() for _ in range(3)))),
    "nested units": Case(lambda: Chain(block(), Outer(), block()), unit=(Outer, Detached)),
    "tied": Case(Tied),
    "tied, micro-batches": Case(Tied, micro_batches),
    "called twice": Case(shared_twice),
    "called twice, micro-batches": Case(shared_twice, micro_batches),
    "shared by units": Case(SharedInside),
    "structured outputs": Case(Structured),
    "tiny": Case(Tiny),
    "one parameter": Case(lambda: nn.Linear(WIDTH, 1, bias=False)),
    "unequal": Case(Unequal),
    "buffers": Case(buffered),
    "channels last": Case(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 1, WIDTH)),
            nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last),
            nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last),
        )
    ),
    "float64": Case(lambda: Chain().double(), dtype=torch.float64),
    "bfloat16": Case(bfloat16, dtype=torch.bfloat16),
    "micro-batches": Case(step=micro_batches),
    "two forwards": Case(step=two_forwards),
    "two forwards, called twice": Case(shared_twice, two_forwards),
    "two backwards": Case(step=two_backwards),
    "backwards reversed": Case(step=backwards_reversed),
    "retain_graph": Case(step=retained),
    "gradients assigned": Case(step=assigned),
    "evaluation": Case(step=evaluated),
    "forward raises": Case(step=forward_raises),
    "backward raises": Case(step=backward_raises),
    "gradient of the input": Case(step=input_gradient),
} | {
    f"{name}, reentrant={reentrant}": Case(
        lambda make=make, reentrant=reentrant: make(reentrant=reentrant), step
    )
    for reentrant in (False, True)
    for name, make, step in [
        ("checkpoint", Checkpointed, plain),
        ("checkpoint, micro-batches", Checkpointed, micro_batches),
        ("checkpoint of all", CheckpointedWhole, plain),
        (
            "checkpoint, frozen",
            lambda reentrant: Checkpointed(
                block(), freeze(block()), nn.Sequential(freeze(linear()), linear()),
                reentrant=reentrant,
            ),
            plain,
        ),
    ]
}  # fmt: skip


def batches(case: Case, step: int, rank: int) -> Batches:
    def batch(i: int) -> Tensor:
        seed = torch.Generator().manual_seed(1000 * step + 10 * i + rank)
        return torch.randn(ROWS, WIDTH, generator=seed).to(case.dtype)

    return batch


def model(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return case.make()


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    # Powers of two: in bfloat16 torch rounds `p - lr * g` by an element's place in the tensor.
    return torch.optim.SGD(net.parameters(), lr=2**-4, momentum=0.5)


def unchanged(net: nn.Module) -> list[Tensor]:
    """Buffers that training does not write to."""
    return [b for b in net.buffers() if b.dtype in (torch.bool, torch.complex64)]


def train(comm: Communicator, case: Case, stage: int) -> list[Tensor]:
    """Every parameter after every step."""
    net = model(case, seed=comm.rank)  # rank 0's values must win
    engine = ringdp.shard(net, stage=stage, unit=case.unit, comm=comm)
    try:
        opt, out = optimizer(net), []
        for step in range(STEPS):
            opt.zero_grad()
            case.step(net, batches(case, step, comm.rank))
            opt.step()
            at_rest = State.UNSHARDED if stage == 0 else State.SHARDED
            assert all(u.state is at_rest for u in engine.units)
            assert engine.ledger.now["gathered"] == engine.ledger.now["buckets"] == 0
            with engine.full_parameters():
                out += [p.detach().clone() for p in net.parameters()]
        return out + unchanged(net)
    finally:
        engine.close()


def single(case: Case, ranks: int) -> list[Tensor]:
    """The same in one process: the gradients of all ranks' batches, averaged."""
    net = model(case, seed=0)
    opt, out = optimizer(net), []
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in net.parameters()]
        for rank in range(ranks):
            opt.zero_grad()
            calls = getattr(net, "calls", None)
            case.step(net, batches(case, step, rank))
            if calls is not None and rank < ranks - 1:  # all ranks skip alike
                net.calls = calls
            for t, p in zip(total, net.parameters(), strict=True):
                if p.grad is not None:
                    t += p.grad / ranks
        for t, p in zip(total, net.parameters(), strict=True):
            if p.requires_grad:
                p.grad = t
        opt.step()
        out += [p.detach().clone() for p in net.parameters()]
    return out + unchanged(net)


def all_stages(comm: Communicator, name: str) -> list[list[Tensor]]:
    return [train(comm, CASES[name], stage) for stage in range(4)]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_loop_trains_as_one_process_does(ranks, n, name):
    found = ranks(n)(all_stages, name)
    bits = [t.tolist() for t in found[0][0]]
    for rank, stages in enumerate(found):
        for stage, parameters in enumerate(stages):
            assert [t.tolist() for t in parameters] == bits, f"stage {stage}, rank {rank}"
    rtol, atol = (0.05, 0.05) if CASES[name].dtype is torch.bfloat16 else (1e-4, 1e-6)
    for mine, exact in zip(found[0][0], single(CASES[name], n), strict=True):
        torch.testing.assert_close(mine, exact, rtol=rtol, atol=atol)
