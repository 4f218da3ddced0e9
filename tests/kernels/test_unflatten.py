"""unflatten: rounds as flatten, the kernel equals the reference, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ringdp.kernels import flatten, unflatten
from ringdp.kernels.unflatten import unflatten_torch, unflatten_triton
from tests.kernels.inputs import LENGTHS, PAIRS, bucket_tensors, random_floats, same_bits

TENTH = float(torch.tensor(0.1))  # the interpreter passes floats as float32
# The interpreter computes with numpy, which warns of overflows that the tests cause on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")


@pytest.mark.parametrize("scale", [1.0, -0.375])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_elements_are_rounded_as_by_flatten(
    source: torch.dtype, target: torch.dtype, scale: float
) -> None:
    flat, got = random_floats(100, source, special=True), torch.empty(100, dtype=target)
    unflatten(flat, [got], scale=scale, offsets=[0])
    want = torch.empty(100, dtype=target)
    flatten([flat], want, scale=scale, offsets=[0])
    assert same_bits(got, want)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_kernel_equals_reference(
    interpreted: None, source: torch.dtype, target: torch.dtype
) -> None:
    got, offsets, elems = bucket_tensors(target)
    want, _, _ = bucket_tensors(target)
    flat = random_floats(elems, source)
    unflatten_torch(flat, want, TENTH, offsets)
    unflatten_triton(flat, got, TENTH, offsets)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("skip", [0, 1])
def test_kernel_equals_reference_for_all_lengths(interpreted: None, skip: int) -> None:
    """All lengths in one launch, from an aligned and an unaligned buffer."""
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    flat = random_floats(sum(LENGTHS), torch.float32, skip=skip, special=True)
    got, want = ([torch.empty(n, dtype=torch.bfloat16) for n in LENGTHS] for _ in range(2))
    unflatten_torch(flat, want, 0.5, offsets)
    unflatten_triton(flat, got, 0.5, offsets)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("count", [1, 500])
def test_kernel_takes_1_or_500_tensors(interpreted: None, count: int) -> None:
    flat = random_floats(count * 5, torch.float32)
    got = [torch.empty(3) for _ in range(count)]
    unflatten_triton(flat, got, 1.0, [5 * i for i in range(count)])
    assert same_bits(torch.stack(got), flat.view(count, 5)[:, :3].contiguous())


def test_mixed_dtypes_no_tensors_and_leaves_are_accepted(interpreted: None) -> None:
    flat = torch.arange(8.0)
    for run in (unflatten_torch, unflatten_triton):
        a, b = torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)
        run(flat, [a, b], 2.0, [1, 5])
        assert (a.tolist(), b.tolist()) == ([2, 4, 6], [10, 12])
        run(flat, [], 1.0, [])
    strided = torch.zeros(2, 2, requires_grad=True).t()
    unflatten_triton(flat, [strided], 1.0, [4])
    assert strided.tolist() == [[4, 5], [6, 7]]
    leaf = torch.zeros(4, requires_grad=True)
    unflatten(flat, [leaf], scale=0.5, offsets=[4])
    assert leaf.tolist() == [2.0, 2.5, 3.0, 3.5]


@pytest.mark.parametrize(
    ("flat", "tensor", "offset", "scale", "message"),
    [
        (torch.empty(2, 4), torch.ones(4), 0, 1.0, "flat must be 1-D and contiguous"),
        (torch.empty(8), torch.ones(4), 5, 1.0, "does not fit"),
        (torch.empty(8), torch.ones(4), 0, float("inf"), "finite"),
        (torch.empty(8), torch.ones(4).int(), 0, 1.0, "not supported"),
        (torch.empty(8).double(), torch.ones(4).half(), 0, 1.0, "round twice"),
        (torch.empty(8), torch.ones(4, device="meta"), 0, 1.0, "meta"),
    ],
)
def test_wrong_arguments_are_refused(
    flat: torch.Tensor, tensor: torch.Tensor, offset: int, scale: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        unflatten(flat, [tensor], scale=scale, offsets=[offset])
    with pytest.raises(ValueError, match=message):
        unflatten_triton(flat, [tensor], scale, [offset])


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_gpu_equals_cpu(source: torch.dtype, target: torch.dtype) -> None:
    want, offsets, elems = bucket_tensors(target)
    got, _, _ = bucket_tensors(target, "cuda")
    flat = random_floats(elems, source)
    there = flat.cuda()
    for scale in (0.1, 0.2):  # the second call repeats the first's launch
        unflatten(flat, want, scale=scale, offsets=offsets)
        unflatten(there, got, scale=scale, offsets=offsets)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(want, got, strict=True))
