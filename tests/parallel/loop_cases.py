"""Training loops that an engine must support, as cases of a model and an iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.loop_models import (
    WIDTH,
    CalledAround,
    CallsItself,
    Chain,
    Checkpointed,
    CheckpointedWhole,
    Detached,
    Fail,
    Guided,
    GuidedByFrozen,
    LeavesInAttribute,
    Objects,
    Outer,
    PartOfUnit,
    PassesOn,
    SharedInside,
    Skips,
    Structured,
    Tied,
    Tiny,
    Unequal,
    block,
    buffered,
    freeze,
    linear,
    loss,
)

Batches = Callable[[int], Tensor]  # i -> this rank's i-th micro-batch of the step

# One iteration: all from zero_grad to the optimizer's step.


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
    """Replaces .grad by new tensors between micro-batches, and removes one."""
    loss(net(x(0))).backward()
    for p in net.parameters():
        p.grad = None if p.grad is None else p.grad * 0.5
    next(net.parameters()).grad = None
    loss(net(x(1))).backward()


def evaluated(net: nn.Module, x: Batches) -> None:
    """Evaluates before, between and after the training forward and backward, in every mode."""
    with torch.no_grad():
        net(x(5))
    one = loss(net(x(0)))
    with torch.inference_mode():
        net.eval()(x(6))
    net.train()
    one.backward()
    net(x(7))  # with gradients, but without a backward


def evaluated_in_backward(net: nn.Module, x: Batches) -> None:
    """Evaluates in hooks on a block's input, and amid its backward."""
    seen: list[Tensor] = []

    def evaluate(_: Tensor) -> None:
        with torch.no_grad():
            seen.append(net(x(1)))

    def watch(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        inputs[0].register_hook(evaluate)
        return inputs[0] * 1

    hooked: Any = net.get_submodule("blocks.1"), net.get_submodule("blocks.1.1")
    handles = [module.register_forward_pre_hook(watch) for module in hooked]
    value = loss(net(x(0)))
    for handle in handles:
        handle.remove()
    value.backward()
    assert len(seen) == 2
    assert seen[0].equal(seen[1])


def forward_raises(net: nn.Module, x: Batches) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    loss(net(x(0))).backward()
    handle = list(net.modules())[-2].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        net(x(1))
    handle.remove()


def backward_raises(net: nn.Module, x: Batches) -> None:
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


def left_alone(net: nn.Module, x: Batches) -> None:
    net(x(0))
    loss(net.y).backward()


def forward_alone(net: nn.Module, x: Batches) -> None:
    net(x(0))


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


class GuidedByInput(nn.Module):
    """Computes a gradient during its forward, which goes to what made its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        (by_input,) = torch.autograd.grad(self.inner(x).square().sum(), x)
        return self.inner(x - by_input)


def guided_below() -> nn.Module:
    guided = nn.Sequential(GuidedByInput(), GuidedByInput())
    return nn.Sequential(linear(), Checkpointed(guided, reentrant=False))


class TrainsItself(Chain):
    """Runs its backward within its forward."""

    def forward(self, x: Tensor) -> Tensor:
        value = loss(super().forward(x))
        value.backward()
        return value.detach()


class Conditioned(Chain):
    """Calls itself, with gradients or without, and then its blocks."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.trains, self.first = trains, True

    def forward(self, x: Tensor) -> Tensor:
        if not self.first:
            return super().forward(x)
        self.first = False
        with torch.set_grad_enabled(self.trains):
            condition: Tensor = self(x)
        self.first = True
        return super().forward(x + condition)


class Halves(nn.Module):
    """Called for one half of its parameters, then in a checkpoint for the other, whose backward
    ends first."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.halves[which](x)
        return out


class InHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = Halves()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.both, self.both(x, 0), 1, use_reentrant=True)
        return out


def frozen_norm_twice() -> nn.Module:
    b = nn.Sequential(freeze(nn.LayerNorm(WIDTH)), linear())
    return Checkpointed(b, b, reentrant=False)


def calling_themselves() -> nn.Module:
    return Chain(CallsItself(*block()), CallsItself(*block()))


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
    "calls itself": Case(calling_themselves),
    "calls itself, two forwards": Case(calling_themselves, two_forwards),
    "checkpoint called twice": Case(frozen_norm_twice, unit=(nn.LayerNorm, nn.Linear)),
    "one half in a checkpoint": Case(InHalves, unit=Halves),
    "the model calls itself": Case(lambda: Conditioned(trains=True)),
    "the model calls itself, micro-batches": Case(lambda: Conditioned(trains=True), micro_batches),
    "the model calls itself without gradients": Case(lambda: Conditioned(trains=False)),
    "the model calls itself, evaluation": Case(lambda: Conditioned(trains=False), evaluated),
    "shared by units": Case(SharedInside),
    "structured outputs": Case(Structured),
    "objects": Case(Objects),
    "left in an attribute": Case(LeavesInAttribute, left_alone),
    "passed on": Case(PassesOn),
    "passed on, micro-batches": Case(PassesOn, micro_batches),
    "tiny": Case(Tiny),
    "one parameter": Case(lambda: nn.Linear(WIDTH, 1, bias=False)),
    "unequal": Case(Unequal),
    "gradients amid a forward": Case(Guided),
    "gradients amid a forward, micro-batches": Case(Guided, micro_batches),
    "gradients amid a forward, of a checkpoint": Case(GuidedByFrozen),
    "gradients amid a forward, in a checkpoint": Case(
        lambda: Checkpointed(*(GuidedByInput() for _ in range(3)), reentrant=False)
    ),
    "gradients amid a forward, below a checkpoint": Case(guided_below, unit=nn.Linear),
    "backward amid a forward": Case(TrainsItself, forward_alone),
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
    "evaluation amid a backward": Case(step=evaluated_in_backward),
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
        ("called around a checkpoint", CalledAround, plain),
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
