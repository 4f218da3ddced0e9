"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the error has no bias.

    out = the upper 16 bits of (bits(x) + r),   r uniform in [0, 2^16)

The bits of finite floats are ordered by magnitude. So x is rounded to the next bfloat16 away from
zero with a probability equal to how far x lies on the way there: the mean is x itself, and updates
that rounding to nearest would swallow survive on average (Gupta et al. 2015). inf stays, nan
becomes torch's, and beyond the largest bfloat16 the next one up is inf.
r of element e is a hash of (seed, offset + e) and of nothing else, so an element's bits do not
depend on its shard, its block or the device. The hash is two rounds of xor-shift and multiply, the
finalizer of MurmurHash3 with the constants of Wellons' lowbias32, keyed before and in between. It
is meant for rounding, not for secrets.
Must move 6 bytes an element. Leaves out: CUDA graph capture (a graph would repeat one seed).
Reference: `stochastic_round_torch`.
"""
# ruff: noqa: N803  a Triton constant is upper case

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ringdp._core import Launch

from . import host
from .address import check_storage
from .jit import jit, sixteens
from .repeats import Repeats

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024  # elements per program
HIGH, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B  # odd multipliers
NAN = 0x7FC0  # torch's bfloat16
MOST = (1 << 63) - 1  # elements
HALF = 1 << 32  # places of one upper half
MASK = HALF - 1
_repeats = Repeats()


def stochastic_round(x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
    """out = x rounded at random; x is float32[elems], out bfloat16[elems], both contiguous.

    `offset` is the index of x[0] in the whole that x is a shard of. Use another `seed`, in
    [0, 2^64), for every step. Raises ValueError on any other dtype, shape, layout, device or seed.
    """
    valid = 0 <= seed < 1 << 64 and 0 <= offset <= MOST - x.numel()
    done = False
    if valid and offset % HALF + x.numel() <= HALF:
        hashed = late(keys(seed), offset)
        if x.is_cuda:
            done = _repeats.again([x, out], None, hashed)
        else:
            constants = (*hashed, FIRST, SECOND)
            done = host.stochastic_round(x, out, constants, torch.get_num_threads())
    if not done:
        _checked(x, out, seed, offset, valid=valid)
    increment_version(out)


def _checked(x: Tensor, out: Tensor, seed: int, offset: int, *, valid: bool) -> None:
    for name, tensor, dtype in (("x", x, torch.float32), ("out", out, torch.bfloat16)):
        if tensor.dim() != 1 or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype}[elems], not {tensor.dtype}"
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
    if x.shape != out.shape or x.device != out.device:
        raise ValueError(
            f"x is {list(x.shape)} on {x.device}, out {list(out.shape)} on {out.device}"
        )
    if not valid:
        raise ValueError(f"seed is in [0, 2^64) and offset in [0, 2^63), not {seed} and {offset}")
    if x.is_cuda:
        launches = stochastic_round_triton(x, out, keys(seed), offset)
        if len(launches) == 1:  # each has a place of its own
            _repeats.keep([x, out], None, launches)
        return
    until = HALF - offset % HALF
    if until < x.numel():  # the rest has another upper half
        stochastic_round(x[:until], out[:until], seed=seed, offset=offset)
        stochastic_round(x[until:], out[until:], seed=seed, offset=offset + until)
    else:
        check_storage(x, out)
        stochastic_round_torch(x, out, keys(seed), offset)


def keys(seed: int) -> tuple[int, int]:
    """Two uint32 from a seed, by SplitMix64 (Steele et al. 2014): close seeds give distant keys."""
    z = (seed + 0x9E3779B97F4A7C15) % (1 << 64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
    z ^= z >> 31
    return z >> 32, z & 0xFFFFFFFF


@torch.no_grad()
def stochastic_round_torch(x: Tensor, out: Tensor, key: tuple[int, int], offset: int) -> None:
    """The hash in int64, modulo 2^32 after each operation."""
    place = offset + torch.arange(x.numel(), device=x.device)
    h = (place & MASK) ^ ((place >> 32) * HIGH & MASK) ^ key[0]
    h = ((h ^ h >> 16) * FIRST + key[1]) & MASK
    h = (h ^ h >> 15) * SECOND & MASK
    random = (h ^ h >> 16) & 0xFFFF
    bits = (x.view(torch.int32) + random.int()) >> 16
    out.view(torch.int16).copy_(bits.masked_fill_(x.isnan(), NAN))


def late(key: tuple[int, int], place: int) -> tuple[int, int, int]:
    """A launch's arguments for the seed and its first element's place: the place's lower half, and
    two keys, the first of which includes the upper half. The kernel applies the first key after
    h ^ (h >> 16), so it is key ^ (key >> 16) here."""
    high, low = divmod(place, HALF)
    first = key[0] ^ high * HIGH % HALF
    return low, first ^ first >> 16, key[1]


# A GPU computes integers at half the rate of floats, which takes over half as long as moving the
# bytes. A new seed or place in mid-training must not cause a compilation.
@jit(num_warps=4, unspecialized=("low", "key0", "key1"))
def stochastic_round_kernel(
    x: tl.tensor,
    out: tl.tensor,
    elems: tl.tensor,
    low: tl.uint32,
    key0: tl.uint32,
    key1: tl.uint32,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    NAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    inside = start + lane < elems
    value = tl.load(x + start + lane, mask=inside)
    h = tl.cast(low, tl.uint32) + start.to(tl.uint32) + lane.to(tl.uint32)
    h ^= (h >> 16) ^ tl.cast(key0, tl.uint32)
    h = h * tl.full((), FIRST, tl.uint32) + tl.cast(key1, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full((), SECOND, tl.uint32)
    h = (h ^ (h >> 16)) & 0xFFFF
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(value == value, bits, tl.full((), NAN << 16, tl.uint32)) + h
    rounded = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(out + start + lane, rounded, mask=inside)


def stochastic_round_triton(
    x: Tensor, out: Tensor, key: tuple[int, int], offset: int
) -> list[Launch | None]:
    until = HALF - offset % HALF
    if until < x.numel():  # the rest has another upper half
        first = stochastic_round_triton(x[:until], out[:until], key, offset)
        return first + stochastic_round_triton(x[until:], out[until:], key, offset + until)
    return [
        stochastic_round_kernel.launch(
            -(-elems // BLOCK),
            source,
            target,
            elems,
            *late(key, offset + first),
            FIRST=FIRST,
            SECOND=SECOND,
            NAN=NAN,
            BLOCK=BLOCK,
        )
        for first, elems, (source, target) in sixteens(x, out)  # See Note [16-byte accesses]
    ]
