"""Inputs for the tests of several kernels, and comparisons of their results."""

from __future__ import annotations

import torch

from ringdp.kernels.precision import FLOATS, HALF

PAIRS = [(a, b) for a in FLOATS for b in FLOATS if not (a == torch.float64 and b in HALF)]
LENGTHS = [0, 1, 15, 16, 17, 4095, 4096, 100003]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def random_floats(
    elems: int, dtype: torch.dtype, *, skip: int = 0, special: bool = False
) -> torch.Tensor:
    """Floats of many magnitudes, as a view from element `skip` of an allocation on: 1 makes it
    unaligned.

    `special` puts ±inf, nan, ±0, the smallest subnormal and the largest number among them.
    """
    g = torch.Generator().manual_seed(elems + 7)
    size = elems + skip
    spread = torch.exp2(torch.randint(-30, 30, (size,), generator=g, dtype=torch.float64))
    info = torch.finfo(dtype)
    x = torch.randn(size, generator=g, dtype=torch.float64) * spread
    x = x.clamp(-info.max, info.max).to(dtype)[skip:]
    if special:
        odd = [
            torch.inf,
            -torch.inf,
            torch.nan,
            0.0,
            -0.0,
            info.max,
            info.smallest_normal * info.eps,
        ]
        x[: len(odd)] = torch.tensor(odd, dtype=torch.float64).to(dtype)[:elems]
    return x


class OnSecondGpu(torch.Tensor):
    """A tensor that reports to be on the second GPU."""

    def get_device(self) -> int:
        return 1


def copy_to_gpu(x: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with x's alignment to 16 bytes; `x.cuda()` would always be aligned."""
    skip = x.data_ptr() % 16 // x.itemsize
    return torch.empty(skip + len(x), dtype=x.dtype, device="cuda")[skip:].copy_(x)
