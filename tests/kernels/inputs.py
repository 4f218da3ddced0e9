"""Inputs for the tests of several kernels, and comparisons of their results."""

from __future__ import annotations

import torch

from ringdp.kernels.precision import FLOATS, HALF

PAIRS = [(a, b) for a in FLOATS for b in FLOATS if not (a == torch.float64 and b in HALF)]
LENGTHS = [0, 1, 15, 16, 17, 4095, 4096, 100003]
MANY = 7 * 32768 + 1000  # elements: several parts (csrc/threads.hpp), the last one shorter


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, except for the payload of nans, which IEEE leaves open."""
    return same_bits(a.where(a == a, torch.nan), b.where(b == b, torch.nan))


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


def bucket_tensors(
    dtype: torch.dtype, device: str = "cpu"
) -> tuple[list[torch.Tensor], list[int], int]:
    """Tensors for every path of flatten and unflatten: full chunk, tail, odd address, strides,
    empty, 0-d; their offsets in a bucket; and the bucket's length."""
    g = torch.Generator().manual_seed(7)

    def floats(*shape: int) -> torch.Tensor:
        spread = torch.exp2(torch.randint(-30, 30, shape, generator=g, dtype=torch.float64))
        return (torch.randn(shape, generator=g, dtype=torch.float64) * spread).to(dtype).to(device)

    tensors = [
        floats(4096 + 16),  # aligned: a full chunk and a tail
        floats(4097)[1:],  # its address is not a multiple of 16 bytes
        floats(7, 13).t(),
        floats(0),
        floats(1).squeeze(0),
        floats(64, 128)[::2, ::2],
        floats(3, 1500),
    ]
    offsets, end = [], 16
    for i, x in enumerate(tensors):
        offsets.append(end)
        end += x.numel() + (i % 3)  # gaps of 0, 1 and 2 elements
    order = [3, 0, 6, 2, 1, 5, 4]  # the list's order is not the bucket's
    return [tensors[i] for i in order], [offsets[i] for i in order], end + 5000


class OnSecondGpu(torch.Tensor):
    """A tensor that reports to be on the second GPU."""

    def get_device(self) -> int:
        return 1


def copy_to_gpu(x: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with x's alignment to 16 bytes; `x.cuda()` would always be aligned."""
    skip = x.data_ptr() % 16 // x.itemsize
    return torch.empty(skip + len(x), dtype=x.dtype, device="cuda")[skip:].copy_(x)
