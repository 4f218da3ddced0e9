"""The inputs on which kernels are timed, and torch's ways to do the same: one row of CASES each.

A size is that of one float32 buffer, S bytes. `moves` is how many times S must be moved, by the
formula in the kernel's docstring. Factors are -1, so that repeated calls change no magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.kernels import adamw, flatten, fold, squared_norm, stochastic_round, unflatten, unscale

OURS = "ringdp"
PARTS = 8  # buffers to fold, one per rank
TENSORS = 64  # of a bucket, if it has that many elements
LEARNING_RATE = 1e-3

Call = Callable[[], object]


class Case(NamedTuple):
    moves: float
    ways: Callable[[int, torch.device], dict[str, Call]]  # for this many elements; ours first


def _tensors(elems: int, device: torch.device) -> tuple[list[Tensor], list[int]]:
    """Tensors that lie apart in memory, like gradients, and their offsets in a bucket."""
    size = -(-elems // TENSORS)
    places = list(range(0, elems, size))
    made = [torch.randn(min(size, elems - first), device=device) for first in places]
    return made, places


def _scaled(inputs: list[Tensor], outputs: list[Tensor]) -> dict[str, Call]:
    def foreach() -> None:
        torch._foreach_copy_(outputs, inputs)
        torch._foreach_mul_(outputs, -1.0)

    def each() -> None:
        for x, out in zip(inputs, outputs, strict=True):
            torch.mul(x, -1.0, out=out)

    return {"_foreach": foreach, "mul of each": each}


def _flatten(elems: int, device: torch.device) -> dict[str, Call]:
    tensors, places = _tensors(elems, device)
    out = torch.empty(elems, device=device)
    views = [out[p : p + len(x)] for p, x in zip(places, tensors, strict=True)]
    return {
        OURS: lambda: flatten(tensors, out, scale=-1.0, offsets=places),
        "cat, mul_": lambda: torch.cat(tensors, out=out).mul_(-1.0),
        "_chunk_cat, mul_": lambda: torch._chunk_cat(tensors, 0, 1, out=out[None]).mul_(-1.0),
        **_scaled(tensors, views),
    }


def _unflatten(elems: int, device: torch.device) -> dict[str, Call]:
    tensors, places = _tensors(elems, device)
    flat = torch.randn(elems, device=device)
    views = [flat[p : p + len(x)] for p, x in zip(places, tensors, strict=True)]
    return {
        OURS: lambda: unflatten(flat, tensors, scale=-1.0, offsets=places),
        **_scaled(views, tensors),
    }


def _fold(elems: int, device: torch.device) -> dict[str, Call]:
    parts, out = torch.randn(PARTS, elems, device=device), torch.empty(elems, device=device)

    def added() -> None:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)

    return {
        OURS: lambda: fold(parts, out),
        "sum(0)": lambda: torch.sum(parts, 0, out=out),
        "add_": added,
    }


def _unscale(elems: int, device: torch.device) -> dict[str, Call]:
    x, found = torch.randn(elems, device=device), torch.zeros(1, device=device)
    factor = torch.full((1,), -1.0, device=device)
    return {
        OURS: lambda: unscale(x, x, found, scale=-1.0),
        "_amp_foreach": lambda: torch._amp_foreach_non_finite_check_and_unscale_(
            [x], found, factor
        ),
        "mul_, isfinite": lambda: torch.isfinite(x.mul_(-1.0)).all(),
    }


def _stochastic_round(elems: int, device: torch.device) -> dict[str, Call]:
    x = torch.randn(elems, device=device)
    out = torch.empty(elems, dtype=torch.bfloat16, device=device)

    def noise() -> None:
        random = torch.randint(1 << 16, (elems,), dtype=torch.int32, device=device)
        bits = random.add_(x.view(torch.int32)).bitwise_right_shift_(16)
        out.view(torch.int16).copy_(bits)

    return {OURS: lambda: stochastic_round(x, out, seed=1), "randint, add": noise}


def _adamw(elems: int, device: torch.device) -> dict[str, Call]:
    grad = torch.randn(elems, device=device)
    copy = torch.empty(elems, dtype=torch.bfloat16, device=device)
    state = [torch.zeros(elems, device=device) for _ in range(3)]

    def ours() -> None:
        adamw(
            state[0],
            grad,
            *state[1:],
            step=10,
            lr=LEARNING_RATE,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.01,
            copy=copy,
        )

    def torchs(fused: bool) -> Call:
        param = torch.zeros(elems, device=device, requires_grad=True)
        param.grad = grad
        optimizer = torch.optim.AdamW([param], lr=LEARNING_RATE, fused=fused, foreach=not fused)

        def step() -> None:
            optimizer.step()
            copy.copy_(param.detach())

        return step

    return {OURS: ours, "fused, copy_": torchs(True), "foreach, copy_": torchs(False)}


def _squared_norm(elems: int, device: torch.device) -> dict[str, Call]:
    tensors, _ = _tensors(elems, device)
    return {
        OURS: lambda: squared_norm(tensors),
        "_foreach_norm": lambda: torch.stack(torch._foreach_norm(tensors)).norm(),
    }


CASES: dict[str, Case] = {
    "flatten": Case(2, _flatten),
    "unflatten": Case(2, _unflatten),
    "fold": Case(PARTS + 1, _fold),
    "unscale": Case(2, _unscale),
    "stochastic_round": Case(1.5, _stochastic_round),
    "adamw": Case(7.5, _adamw),
    "squared_norm": Case(1, _squared_norm),
}
