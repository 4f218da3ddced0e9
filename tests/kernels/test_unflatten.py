"""unflatten: flatten undone, the kernel against the reference bit for bit, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from ringdp.kernels import flatten, unflatten
from ringdp.kernels.unflatten import unflatten_torch, unflatten_triton
from tests.kernels.inputs import LENGTHS, PAIRS, same_bits, some

TENTH = float(torch.tensor(0.1))  # the interpreter takes floats for float32
# The interpreter computes with numpy, which warns of what it is meant to do here.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")


def targets(dtype: torch.dtype, device: str = "cpu") -> tuple[list[torch.Tensor], list[int], int]:
    """Full chunks, tails, an odd address, strides, nothing, 0-d; and where each lies."""
    tensors = [
        torch.empty(4096 + 16, dtype=dtype, device=device),
        torch.empty(4097, dtype=dtype, device=device)[1:],
        torch.empty(13, 7, dtype=dtype, device=device).t(),
        torch.empty(0, dtype=dtype, device=device),
        torch.empty((), dtype=dtype, device=device),
        torch.empty(64, 128, dtype=dtype, device=device)[::2, ::2],
    ]
    offsets, end = [], 16
    for i, x in enumerate(tensors):
        offsets.append(end)
        end += x.numel() + i % 3
    order = [3, 0, 2, 1, 5, 4]
    return [tensors[i] for i in order], [offsets[i] for i in order], end + 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_undoes_flatten(dtype: torch.dtype) -> None:
    tensors, offsets, elems = targets(dtype)
    for i, x in enumerate(tensors):
        x.copy_(some(x.numel(), dtype).view(x.shape) + i)
    flat = torch.empty(elems, dtype=dtype)
    flatten(tensors, flat, offsets=offsets)
    back = [torch.full_like(x, torch.nan) for x in tensors]
    unflatten(flat, back, offsets=offsets)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


@pytest.mark.parametrize("scale", [1.0, -0.375])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_each_element_is_rounded_as_flatten_does(
    source: torch.dtype, target: torch.dtype, scale: float
) -> None:
    flat, got = some(100, source, special=True), torch.empty(100, dtype=target)
    unflatten(flat, [got], scale=scale, offsets=[0])
    want = torch.empty(100, dtype=target)
    flatten([flat], want, scale=scale, offsets=[0])
    assert same_bits(got, want)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_kernel_equals_reference(
    interpreted: None, source: torch.dtype, target: torch.dtype
) -> None:
    got, offsets, elems = targets(target)
    want, _, _ = targets(target)
    flat = some(elems, source)
    unflatten_torch(flat, want, TENTH, offsets)
    unflatten_triton(flat, got, TENTH, offsets)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("skip", [0, 1])
def test_lengths(interpreted: None, skip: int) -> None:
    """All in one launch, from an aligned buffer and from one that is not."""
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    flat = some(sum(LENGTHS), torch.float32, skip=skip, special=True)
    got, want = ([torch.empty(n, dtype=torch.bfloat16) for n in LENGTHS] for _ in range(2))
    unflatten_torch(flat, want, 0.5, offsets)
    unflatten_triton(flat, got, 0.5, offsets)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("count", [1, 500])
def test_number_of_tensors(interpreted: None, count: int) -> None:
    flat = some(count * 5, torch.float32)
    got = [torch.empty(3) for _ in range(count)]
    unflatten_triton(flat, got, 1.0, [5 * i for i in range(count)])
    assert same_bits(torch.stack(got), flat.view(count, 5)[:, :3].contiguous())


def test_mixed_dtypes_none_and_leaves(interpreted: None) -> None:
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
def test_refuses(
    flat: torch.Tensor, tensor: torch.Tensor, offset: int, scale: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        unflatten(flat, [tensor], scale=scale, offsets=[offset])
    with pytest.raises(ValueError, match=message):
        unflatten_triton(flat, [tensor], scale, [offset])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_gpu_equals_cpu(source: torch.dtype, target: torch.dtype) -> None:
    want, offsets, elems = targets(target)
    got, _, _ = targets(target, "cuda")
    flat = some(elems, source)
    there = flat.cuda()
    for scale in (0.1, 0.2):  # the second time as the first was launched
        unflatten(flat, want, scale=scale, offsets=offsets)
        unflatten(there, got, scale=scale, offsets=offsets)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(want, got, strict=True))
