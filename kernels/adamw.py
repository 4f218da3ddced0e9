"""AdamW over a flat shard, in place and in one pass, with the same bits on every device.

With t = `step`, counted from 1, λ = `weight_decay`:

    p ← (1 − lr·λ)·p
    m ← m + (1 − β1)·(g − m)
    v ← β2·v + ((1 − β2)·g)·g
    p ← p + (−lr/(1 − β1^t)·m) / (√v/√(1 − β2^t) + ε)
    copy ← round(p)     where there is one: what mixed precision computes and gathers in

Loshchilov & Hutter 2019, in the order of operations of `torch.optim.AdamW`. Every operation is one
IEEE float32 operation, rounded to nearest even, and none are fused, so an element's bits depend on
its own p, g, m, v only: not on its place in the buffer, the shard it is in, or the machine. torch's
own AdamW gives neither promise: with `fused=True` the last elements of a range, which do not fill a
SIMD vector, get other bits than the rest, and the other variants fuse multiply-adds where the CPU
can and take a square root that is up to 0.75 ulp off [measured: torch 2.13, AVX512].
Must move 28 bytes an element, reading p, g, m, v and writing p, m, v; 30 with a copy. Leaves out:
amsgrad, maximize, parameters that are not float32, and CUDA graph capture (a graph would repeat one
step). Reference: `adamw_torch`.
"""
# ruff: noqa: N803  a Triton constant is upper case

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ringdp._core import Launch

from . import host
from .address import check_storage
from .jit import jit, sixteens
from .precision import HALF
from .repeats import Repeats

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024  # elements per program


class Factors(NamedTuple):
    """What the step, the learning rate and the betas come to; float64 here, float32 when used."""

    decay: float  # 1 − lr·λ
    fresh1: float  # 1 − β1
    beta2: float
    fresh2: float  # 1 − β2
    size: float  # −lr/(1 − β1^t)
    correction: float  # √(1 − β2^t)
    eps: float


@lru_cache(maxsize=8)  # every unit of a step asks
def factors_of(
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> Factors:
    if step < 1 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            f"step counts from 1 and betas are in [0, 1), not {step} and {(beta1, beta2)}"
        )
    return Factors(
        decay=1 - lr * weight_decay,
        fresh1=1 - beta1,
        beta2=beta2,
        fresh2=1 - beta2,
        size=-lr / (1 - beta1**step),
        correction=math.sqrt(1 - beta2**step),
        eps=eps,
    )


_repeats = Repeats()


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    copy: Tensor | None = None,
) -> None:
    """Update param, exp_avg and exp_avg_sq in place.

    These three and grad are float32, contiguous, and of equally many elements in any shape.
    `copy`, bfloat16 or float16 but otherwise like them, gets the new param, rounded to nearest
    even. Raises ValueError on any other dtype, number of elements, layout or device, on memory
    that was freed, and on step < 1.
    """
    factors = factors_of(step, float(lr), *betas, eps, weight_decay)
    written = [param, exp_avg, exp_avg_sq] if copy is None else [param, exp_avg, exp_avg_sq, copy]
    given = (param, grad, exp_avg, exp_avg_sq, copy, factors)
    if param.is_cuda:
        if not _repeats.again([grad, *written], None, factors):
            _check(*given[:5])
            _repeats.keep([grad, *written], None, adamw_triton(*given))
    elif not host.adamw(*given, torch.get_num_threads()):
        _check(*given[:5])
        check_storage(grad, *written)
        adamw_torch(*given)
    increment_version(written)


def _check(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy: Tensor | None
) -> None:
    for name, x in (("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if x.numel() != param.numel() or x.device != param.device:
            raise ValueError(
                f"{name} is {list(x.shape)} on {x.device}, param {list(param.shape)} "
                f"on {param.device}"
            )
    for x in (param, grad, exp_avg, exp_avg_sq):
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(
                f"adamw works on contiguous torch.float32, not {x.dtype}{list(x.shape)} with "
                f"strides {x.stride()}"
            )
    if copy is not None and not (
        copy.numel() == param.numel()
        and copy.device == param.device
        and copy.dtype in HALF
        and copy.is_contiguous()
    ):
        raise ValueError(
            f"copy must be contiguous, of {HALF}, {list(param.shape)} on {param.device}, not "
            f"{copy.dtype}{list(copy.shape)} with strides {copy.stride()} on {copy.device}"
        )


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.view(-1)


@torch.no_grad()
def adamw_torch(
    param: Tensor, grad: Tensor, avg: Tensor, avg_sq: Tensor, copy: Tensor | None, k: Factors
) -> None:
    """The reference: no operation in it rounds twice, fuses, or treats a SIMD tail differently."""
    p, g, m, v = map(_flat, (param, grad, avg, avg_sq))
    m.add_((g - m).mul_(k.fresh1))
    v.mul_(k.beta2).add_((g * k.fresh2).mul_(g))
    # √ in float64, then rounded, is the correctly rounded float32 √; torch's own is not.
    root = v.double().sqrt_().float()
    p.mul_(k.decay).add_((m * k.size).div_(root.div_(k.correction).add_(k.eps)))
    if copy is not None:
        _flat(copy).copy_(p)


@jit(num_warps=4, unspecialized=Factors._fields)
def adamw_kernel(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    copy: tl.tensor,  # not looked at unless COPIES
    elems: tl.tensor,
    decay: tl.float32,
    fresh1: tl.float32,
    beta2: tl.float32,
    fresh2: tl.float32,
    size: tl.float32,
    correction: tl.float32,
    eps: tl.float32,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < elems
    p = tl.load(param + where, mask=inside)
    g = tl.load(grad + where, mask=inside)
    m = tl.load(exp_avg + where, mask=inside)
    v = tl.load(exp_avg_sq + where, mask=inside)
    m = m + (g - m) * fresh1
    v = v * beta2 + (g * fresh2) * g
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.full((BLOCK,), 0, tl.float32) + correction) + eps
    p = p * decay + tl.div_rn(m * size, denominator)
    tl.store(param + where, p, mask=inside)
    tl.store(exp_avg + where, m, mask=inside)
    tl.store(exp_avg_sq + where, v, mask=inside)
    if COPIES:
        tl.store(copy + where, p.to(copy.dtype.element_ty), mask=inside)


def adamw_triton(
    param: Tensor, grad: Tensor, avg: Tensor, avg_sq: Tensor, copy: Tensor | None, k: Factors
) -> list[Launch | None]:
    whole = map(_flat, (param, grad, avg, avg_sq, param if copy is None else copy))
    return [
        adamw_kernel.launch(
            -(-elems // BLOCK), *parts, elems, *k, COPIES=copy is not None, BLOCK=BLOCK
        )
        for _, elems, parts in sixteens(*whole)  # See Note [16-byte accesses]
    ]
