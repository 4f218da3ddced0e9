"""stochastic_round: unbiased, to a neighbour, by seed and offset only; the kernel equals the
reference."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from ringdp.kernels import stochastic_round
from ringdp.kernels.stochastic import keys, stochastic_round_torch, stochastic_round_triton
from tests.kernels.inputs import LENGTHS, MANY, copy_to_gpu, random_floats, same_bits

HALF_ULP = 2.0**-8  # of a bfloat16 near 1, whose neighbours are 2^-7 apart


def rounded(x: torch.Tensor, seed: int = 1, offset: int = 0) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    stochastic_round(x, out, seed=seed, offset=offset)
    return out


def test_rounds_to_a_neighbour_and_keeps_exact_values() -> None:
    x = random_floats(20000, torch.float32)
    down = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)  # towards zero
    up = ((x.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    got = rounded(x).float()
    assert ((got == down) | (got == up)).all()
    assert (got == down).any()
    assert (got == up).any()
    assert torch.equal(rounded(down).float(), down)


@pytest.mark.parametrize("sixteenths", [1, 5, 8, 15])
def test_the_probability_of_rounding_up_is_the_distance(sixteenths: int) -> None:
    count = 1 << 18
    x = torch.full((count,), 1 + sixteenths / 16 * 2 * HALF_ULP)
    ups = (rounded(x, seed=sixteenths) > 1).double()
    # Hoeffding 1963: a fair source exceeds this once in 10^12.
    limit = math.sqrt(math.log(2e12) / 2 / count)
    assert abs(ups.mean().item() - sixteenths / 16) < limit
    # Neighbouring elements and other seeds are independent. Non-adjacent pairs are independent, so
    # even and odd ones each keep the bound for half as many.
    p = sixteenths / 16
    other = (rounded(x, seed=sixteenths + 100) > 1).double()
    for a, b in ((ups[:-1], ups[1:]), (ups, other)):
        assert abs((a * b).mean().item() - p * p) < 2 * limit


def test_bits_depend_on_seed_and_offset_only() -> None:
    elems = MANY
    x = random_floats(elems, torch.float32)
    whole = rounded(x, seed=9, offset=5)
    g = torch.Generator().manual_seed(0)
    cuts = sorted({0, elems, *torch.randint(1, elems, (20,), generator=g).tolist()})
    pieces = [rounded(x[a:b], seed=9, offset=5 + a) for a, b in pairwise(cuts)]
    assert same_bits(torch.cat(pieces), whole)
    assert not same_bits(rounded(x, seed=10, offset=5), whole)
    assert not same_bits(rounded(x, seed=9, offset=6), whole)


def test_the_bits_of_the_hash_are_fixed() -> None:
    """The bits of the hash, so that a run can be repeated with another version."""
    x = torch.full((8,), 1 + HALF_ULP)
    assert (rounded(x, seed=0) > 1).int().tolist() == [1, 0, 0, 0, 1, 0, 0, 0]
    far = rounded(x, seed=2**64 - 1, offset=2**40 + 3)
    assert (far > 1).int().tolist() == [0, 0, 1, 0, 0, 1, 1, 0]


def test_inf_nan_and_zeros_are_kept() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0])
    x = torch.cat([x, torch.tensor([0x7F800001, 0x7FFFFFFF, -1]).int().view(torch.float32)])
    for seed in range(20):
        got = rounded(x, seed=seed)
        assert torch.equal(got[[0, 1]], torch.tensor([math.inf, -math.inf]).bfloat16())
        assert got[[2, 3, 6, 7, 8]].isnan().all()
        assert got[[4, 5]].view(torch.int16).tolist() == [0, -0x8000]


@pytest.mark.parametrize("elems", LENGTHS)
def test_kernel_equals_reference(interpreted: None, elems: int) -> None:
    for skip, offset in ((0, 2**40 + 3), (1, 2**32 - 20)):  # also unaligned and across 2^32
        x = random_floats(elems, torch.float32, skip=skip, special=elems > 15)
        got, want = (torch.empty(elems, dtype=torch.bfloat16) for _ in range(2))
        stochastic_round_torch(x, want, keys(3), offset)
        stochastic_round_triton(x, got, keys(3), offset)
        assert same_bits(got, want)


@pytest.mark.parametrize(
    ("x", "out", "seed", "message"),
    [
        (torch.ones(4).double(), torch.ones(4).bfloat16(), 0, "x must be"),
        (torch.ones(4), torch.ones(4), 0, "out must be"),
        (torch.ones(4), torch.ones(8).bfloat16()[::2], 0, "out must be"),
        (torch.ones(4), torch.ones(3).bfloat16(), 0, "x is"),
        (torch.ones(4, device="meta"), torch.ones(4).bfloat16(), 0, "meta"),
        (torch.ones(4), torch.ones(4).bfloat16(), -1, "seed"),
        (torch.ones(4), torch.ones(4).bfloat16(), 2**64, "seed"),
    ],
)
def test_wrong_arguments_are_refused(
    x: torch.Tensor, out: torch.Tensor, seed: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stochastic_round(x, out, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("skip", [0, 1])  # 1: an odd address
@pytest.mark.parametrize("elems", [*LENGTHS, 1 << 20])
def test_gpu_equals_cpu(elems: int, skip: int) -> None:
    x = random_floats(elems, torch.float32, skip=skip, special=elems > 15)
    copy, got = copy_to_gpu(x), torch.empty(elems, dtype=torch.bfloat16, device="cuda")
    for seed in (4, 5):  # the second call repeats the first's launch
        stochastic_round(copy, got, seed=seed, offset=2**32 - 20)
        assert same_bits(got.cpu(), rounded(x, seed, 2**32 - 20))
