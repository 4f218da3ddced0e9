"""flatten: error bound against float64, the kernel equals the reference, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ringdp.kernels import flatten
from ringdp.kernels.flatten import flatten_torch, flatten_triton
from ringdp.kernels.precision import wide_dtype
from ringdp.kernels.spans import Span, chunk_table
from tests.kernels.inputs import LENGTHS, MANY, PAIRS, bucket_tensors, random_floats, same_bits
from tests.kernels.test_host import Made

# The interpreter computes with numpy, which warns of overflows that the tests cause on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

SCALES = [1.0, -0.375, float(torch.tensor(0.1))]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_reference_is_within_the_error_bound(
    source: torch.dtype, target: torch.dtype, scale: float
) -> None:
    tensors, offsets, elems = bucket_tensors(source)
    out = torch.full((elems,), torch.nan, dtype=target)
    flatten(tensors, out, scale=scale, offsets=offsets)
    want = torch.zeros(elems, dtype=torch.float64)
    for x, o in zip(tensors, offsets, strict=True):
        want[o : o + x.numel()] = x.double().flatten() * scale
    # One rounding of the scale, one of the product, one to the target: (1 + u)(1 + u)(1 + v) − 1,
    # or half the smallest subnormal of the target if that is larger.
    wide = torch.finfo(wide_dtype(source, target))
    narrow = torch.finfo(target)
    relative = (1 + wide.eps / 2) ** 2 * (1 + narrow.eps / 2) - 1
    bound = relative * want.abs() + narrow.smallest_normal * narrow.eps
    overflows = want.abs() * (1 + relative) > narrow.max
    assert ((out.double() - want).abs() <= bound)[~overflows].all()
    assert (out[overflows].isinf() | (out[overflows].abs() == narrow.max)).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_kernel_equals_reference(
    interpreted: None, source: torch.dtype, target: torch.dtype, scale: float
) -> None:
    tensors, offsets, elems = bucket_tensors(source)
    got, want = (torch.full((elems,), torch.nan, dtype=target) for _ in range(2))
    flatten_torch(tensors, want, scale, offsets)
    flatten_triton(tensors, got, scale, offsets)
    assert same_bits(got, want)


@pytest.mark.parametrize("skip", [0, 1])
def test_kernel_equals_reference_for_all_lengths(interpreted: None, skip: int) -> None:
    """All lengths in one launch, also at odd addresses, with inf, nan, zeros and subnormals."""
    tensors = [random_floats(n, torch.bfloat16, skip=skip, special=n > 15) for n in LENGTHS]
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    got, want = torch.empty(sum(LENGTHS)), torch.empty(sum(LENGTHS))
    flatten_torch(tensors, want, 0.5, offsets)
    flatten_triton(tensors, got, 0.5, offsets)
    assert same_bits(got, want)


@pytest.mark.parametrize("count", [1, 500])
def test_kernel_takes_1_or_500_tensors(interpreted: None, count: int) -> None:
    tensors = [torch.full((3,), float(i + 1)) for i in range(count)]
    got = torch.full((5 * count,), torch.nan)
    flatten_triton(tensors, got, 1.0, [5 * i for i in range(count)])
    want = torch.tensor([[i + 1.0] * 3 + [0.0] * 2 for i in range(count)])
    assert torch.equal(got.view(count, 5), want)


def test_kernel_takes_sequences_of_any_class(interpreted: None) -> None:
    """One makes its tensors when asked, and nobody else keeps them; the other is a tensor."""
    got = torch.empty(4 * MANY)
    flatten_triton(Made(), got, 1.0, torch.arange(4) * MANY)  # type: ignore[arg-type]
    assert torch.equal(got.view(4, MANY), torch.arange(4.0)[:, None].expand(4, MANY))


def test_kernel_takes_mixed_dtypes_and_no_tensors(interpreted: None) -> None:
    tensors = [torch.randn(5), torch.randn(7).bfloat16(), torch.randn(3, 3).half()]
    got, want = torch.full((30,), torch.nan), torch.full((30,), torch.nan)
    flatten_torch(tensors, want, 0.5, [0, 6, 20])
    flatten_triton(tensors, got, 0.5, [0, 6, 20])
    assert same_bits(got, want)
    assert want.isfinite().all()
    for run in (flatten_torch, flatten_triton):
        empty = torch.full((5000,), torch.nan)
        run([], empty, 1.0, [])
        assert not empty.any()


def test_chunk_table_splits_spans_into_chunks() -> None:
    rows = chunk_table((Span(1 << 40, 3, 8200), Span(0, 8203, 4097), Span(64, 0, 1)), 2, 4096)
    base = 1 << 40
    assert rows.tolist() == [
        [base, 3, 4096],
        [base + 8192, 4099, 4096],
        [base + 16384, 8195, 8],
        [0, 8203, 4096],
        [0, 12299, 1],
        [64, 0, 1],
    ]


def test_tensors_may_require_grad() -> None:
    out = torch.empty(4)
    flatten([torch.ones(4, requires_grad=True)], out, scale=2.0, offsets=[0])
    assert out.tolist() == [2.0] * 4


def test_a_tensor_may_be_its_own_slice_of_the_output() -> None:
    out = torch.arange(8.0)
    flatten([out[2:6]], out, scale=2.0, offsets=[2])
    assert out.tolist() == [0, 0, 4, 6, 8, 10, 0, 0]


@pytest.mark.parametrize(
    ("tensors", "out", "scale", "offsets", "message"),
    [
        ([torch.ones(4)], torch.empty(2, 4), 1.0, [0], "1-D and contiguous"),
        ([torch.ones(4)], torch.empty(8)[::2], 1.0, [0], "1-D and contiguous"),
        ([torch.ones(4)], torch.empty(8), 1.0, [0, 4], "as many offsets"),
        ([torch.ones(4)], torch.empty(8), 1.0, [5], "does not fit"),
        ([torch.ones(4)], torch.empty(8), 1.0, [-1], "does not fit"),
        ([torch.ones(4), torch.ones(2)], torch.empty(8), 1.0, [2, 1], "tensor 1.*overlaps"),
        ([torch.ones(4)], torch.empty(8), float("nan"), [0], "finite"),
        ([torch.ones(4)], torch.empty(8), 1e39, [0], "finite"),
        ([torch.ones(4).int()], torch.empty(8), 1.0, [0], "not supported"),
        ([torch.ones(4)], torch.empty(8).int(), 1.0, [0], "not supported"),
        ([torch.ones(4).double()], torch.empty(8).half(), 1.0, [0], "round twice"),
        ([torch.ones(4, device="meta")], torch.empty(8), 1.0, [0], "meta"),
    ],
)
def test_wrong_arguments_are_refused(
    tensors: list[torch.Tensor],
    out: torch.Tensor,
    scale: float,
    offsets: list[int],
    message: str,
) -> None:
    for _ in range(2):  # twice: the kernel's launcher remembers what it has checked
        with pytest.raises(ValueError, match=message):
            flatten(tensors, out, scale=scale, offsets=offsets)
        with pytest.raises(ValueError, match=message):
            flatten_triton(tensors, out, scale, offsets)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, -0.375, 0.1])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_gpu_equals_cpu(source: torch.dtype, target: torch.dtype, scale: float) -> None:
    tensors, offsets, elems = bucket_tensors(source)
    want = torch.full((elems,), torch.nan, dtype=target)
    flatten(tensors, want, scale=scale, offsets=offsets)
    tensors, offsets, elems = bucket_tensors(source, "cuda")
    got = torch.full((elems,), torch.nan, dtype=target, device="cuda")
    for _ in range(2):  # the second call uses the cached chunk table
        flatten(tensors, got, scale=scale, offsets=offsets)
        assert same_bits(got.cpu(), want)
