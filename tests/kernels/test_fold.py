"""fold: error bound against float64, the kernel equals the reference, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from ringdp.kernels import fold
from ringdp.kernels.fold import INTEGERS, SIGNED, fold_torch, fold_triton
from ringdp.kernels.precision import FLOATS, wide_dtype
from tests.kernels.inputs import LENGTHS, MANY, PAIRS, random_floats, same_bits

# The interpreter computes with numpy, which warns of overflows that the tests cause on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

SHORT = [15, 16, 2500]


def random_parts(n: int, elems: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype in FLOATS:
        spread = torch.exp2(torch.randint(-12, 6, (n, elems), generator=g, dtype=torch.float64))
        return (torch.randn(n, elems, generator=g, dtype=torch.float64) * spread).to(dtype)
    raw = torch.randint(0, 256, (n * elems * dtype.itemsize,), generator=g, dtype=torch.uint8)
    return raw.view(dtype).view(n, elems)  # `view(n, -1)` would fail without elements


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_reference_is_within_the_error_bound(
    source: torch.dtype, target: torch.dtype, n: int
) -> None:
    parts = random_parts(n, 1000, source)
    out = torch.full((1000,), torch.nan, dtype=target)
    fold(parts, out)
    # fsum is exact and rounds once
    sums = [math.fsum(column) for column in parts.double().t().tolist()]
    want = torch.tensor(sums, dtype=torch.float64)
    wide, narrow = torch.finfo(wide_dtype(source, target)), torch.finfo(target)
    # Higham 2002, §4.2: recursive summation errs by at most γ(n−1)·Σ|x|, γ(k) = ku/(1 − ku).
    k = (n - 1) * wide.eps / 2
    error = k / (1 - k) * parts.double().abs().sum(0)
    # The last rounding: half an ulp of the target, or half its smallest subnormal. `want` itself is
    # half an ulp of float64 off.
    last = (narrow.eps + torch.finfo(torch.float64).eps) / 2
    bound = error + (want.abs() + error) * last + narrow.smallest_normal * narrow.eps
    assert ((out.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [*INTEGERS, *SIGNED])
def test_integer_sums_wrap_exactly(dtype: torch.dtype) -> None:
    parts = random_parts(5, 100, dtype)
    out = torch.empty(100, dtype=dtype)
    before = out._version
    fold(parts, out)
    assert out._version > before
    low, bits = torch.iinfo(dtype).min, torch.iinfo(dtype).bits
    sums = [sum(column) for column in zip(*parts.tolist(), strict=True)]
    assert out.tolist() == [(total - low) % 2**bits + low for total in sums]


@pytest.mark.parametrize("elems", SHORT)
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_kernel_equals_reference(
    interpreted: None, source: torch.dtype, target: torch.dtype, n: int, elems: int
) -> None:
    parts = random_parts(n, elems, source)
    got, want = torch.empty(elems, dtype=target), torch.empty(elems, dtype=target)
    wide = wide_dtype(source, target)
    fold_torch(parts, want, wide)
    fold_triton(parts, got, wide)
    assert same_bits(got, want)


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint16])
def test_one_row_may_lie_in_another_tensor(interpreted: None, dtype: torch.dtype, at: int) -> None:
    every = list(random_parts(4, 35, dtype))
    want = torch.empty(35, dtype=dtype)
    fold(torch.stack(every), want)
    own = every.pop(at)
    got, there = torch.empty_like(own), own.clone()
    wide = SIGNED.get(dtype, dtype) if dtype not in FLOATS else torch.float32
    signed = [x.view(SIGNED.get(dtype, dtype)) for x in (torch.stack(every), got, own)]
    fold_triton(signed[0], signed[1], wide, signed[2], at)
    fold(torch.stack(every), there, there, at)
    assert same_bits(got, want)
    assert same_bits(there, want)


@pytest.mark.parametrize("elems", LENGTHS)
def test_kernel_equals_reference_for_all_lengths(interpreted: None, elems: int) -> None:
    """Rows at odd addresses, with inf, nan, zeros and subnormals."""
    parts = torch.stack(
        [random_floats(elems + 1, torch.bfloat16, special=elems > 15) for _ in range(3)]
    )
    got, want = torch.empty(elems), torch.empty(elems)
    fold_torch(parts[:, 1:], want, torch.float32)
    fold_triton(parts[:, 1:], got, torch.float32)
    assert same_bits(got, want)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_kernel_equals_reference_on_integers(interpreted: None, dtype: torch.dtype) -> None:
    parts = random_parts(5, 1040, dtype)
    got, want = torch.empty(1040, dtype=dtype), torch.empty(1040, dtype=dtype)
    fold_torch(parts, want, dtype)
    fold_triton(parts, got, dtype)
    assert same_bits(got, want)


def test_bits_do_not_depend_on_slicing() -> None:
    elems = MANY
    parts = random_parts(4, elems, torch.float32)
    whole = torch.empty(elems)
    fold(parts, whole)
    g = torch.Generator().manual_seed(0)
    cuts = sorted({0, elems, *torch.randint(1, elems, (40,), generator=g).tolist()})
    for first, last in pairwise(cuts):
        out = torch.empty(last - first)
        fold(parts[:, first:last], out)  # its rows are not adjacent
        assert same_bits(out, whole[first:last])


def test_rows_are_added_in_rank_order() -> None:
    big = float(2**24)
    out = torch.empty(1)
    fold(torch.tensor([[1.0], [big], [-big]]), out)
    assert out.item() == 0.0
    fold(torch.tensor([[big], [-big], [1.0]]), out)
    assert out.item() == 1.0


def test_minus_zero_is_kept_and_empty_rows_are_accepted() -> None:
    out = torch.empty(1)
    fold(torch.full((3, 1), -0.0), out)
    assert torch.signbit(out).all()
    fold(torch.empty(3, 0), torch.empty(0))


def test_rows_of_one_element_may_be_lazily_negated() -> None:
    """Both views have one address, and the second may get the first's place in Python's memory."""
    z, out = torch.tensor([[1 + 2j], [3 + 4j], [5 + 6j]]), torch.empty(1)
    for _ in range(2):
        fold(z.imag, out)
        assert out.item() == 12
        fold(z.conj().imag, out)
        assert out.item() == -12


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_output_may_be_a_row(row: int) -> None:
    parts = random_parts(3, 100, torch.float32)
    want = torch.empty(100)
    fold(parts, want)
    fold(parts, parts[row])
    assert same_bits(parts[row], want)


@pytest.mark.parametrize(
    ("parts", "out", "message"),
    [
        (torch.empty(0, 4), torch.empty(4), "n > 0"),
        (torch.empty(4), torch.empty(4), "must be"),
        (torch.empty(2, 4), torch.empty(3), "must be"),
        (torch.empty(4, 2).t(), torch.empty(4), "contiguous"),
        (torch.empty(2, 4), torch.empty(8)[::2], "contiguous"),
        (torch.empty(2, 4), torch.empty(4).int(), "not supported"),
        (torch.empty(2, 4).bool(), torch.empty(4).bool(), "not supported"),
        (torch.empty(2, 4).double(), torch.empty(4).half(), "round twice"),
        (torch.empty(2, 4, device="meta"), torch.empty(4), "meta"),
    ],
)
def test_wrong_arguments_are_refused(parts: torch.Tensor, out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fold(parts, out)


@pytest.mark.parametrize(
    ("own", "at"),
    [
        (torch.empty(3), 0),
        (torch.empty(4).half(), 0),
        (torch.empty(8)[::2], 0),
        (torch.empty(4, device="meta"), 0),
        (torch.empty(4), 3),
        (torch.empty(4), -1),
    ],
)
def test_a_wrong_own_row_is_refused(own: torch.Tensor, at: int) -> None:
    with pytest.raises(ValueError, match="own"):
        fold(torch.empty(2, 4), torch.empty(4), own, at)


@pytest.mark.gpu
@pytest.mark.parametrize("elems", [*LENGTHS, 1 << 20])
@pytest.mark.parametrize(("source", "target"), [*PAIRS, *((d, d) for d in (*INTEGERS, *SIGNED))])
def test_gpu_equals_cpu(source: torch.dtype, target: torch.dtype, elems: int) -> None:
    parts, want = random_parts(8, elems, source), torch.empty(elems, dtype=target)
    fold(parts, want)
    there, got = parts.cuda(), torch.empty(elems, dtype=target, device="cuda")
    for _ in range(2):  # the second call repeats the first's launch
        fold(there, got.zero_())
        assert same_bits(got.cpu(), want)
        fold(there[1:], got.zero_(), there[0].clone())
        assert same_bits(got.cpu(), want)
