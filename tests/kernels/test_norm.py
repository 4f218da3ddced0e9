"""squared_norm: against exact sums, by reference and kernel, within the bound of its docstring."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import pytest
import torch

from ringdp.kernels import squared_norm
from ringdp.kernels.norm import (
    PROGRAMS,
    squared_norm_cpp,
    squared_norm_torch,
    squared_norm_triton,
)
from ringdp.kernels.precision import FLOATS
from ringdp.kernels.spans import BLOCK
from tests.kernels.inputs import LENGTHS, some, there

U = 2.0**-53
WAYS = (squared_norm_cpp, squared_norm_torch, squared_norm_triton)


def exact(tensors: list[torch.Tensor]) -> float:
    """The sum of squares, rounded once."""
    return math.fsum(v * v for x in tensors for v in x.double().flatten().tolist())


def bound(tensors: list[torch.Tensor], value: float) -> float:
    """γ(n − 1) of the sum of positive terms, and half an ulp of `exact`. A square of float64 is
    rounded too, once there and once in `exact`."""
    k = (sum(x.numel() for x in tensors) + 2) * U
    return k / (1 - k) * value + U * value


@pytest.mark.parametrize("dtype", FLOATS)
def test_reference_and_kernel_against_exact(interpreted: None, dtype: torch.dtype) -> None:
    tensors = [
        some(4096 + 100, dtype),
        some(4096, dtype, skip=1),
        some(4000, dtype).view(40, 100)[::3, ::2],
        some(0, dtype),
        some(1, dtype).squeeze(0),
    ]
    want = exact(tensors)
    for run in WAYS:
        got = run(tensors)
        assert (got.dtype, got.shape) == (torch.float64, ())
        assert abs(got.item() - want) <= bound(tensors, want)


@pytest.mark.parametrize("elems", LENGTHS)
def test_lengths(interpreted: None, elems: int) -> None:
    x = [some(elems, torch.float32)]
    want = exact(x)
    for run in WAYS:
        assert abs(run(x).item() - want) <= bound(x, want)


@pytest.mark.parametrize("count", [0, 1, 500])
def test_number_of_tensors(interpreted: None, count: int) -> None:
    tensors = [torch.full((3,), float(i)) for i in range(count)]
    for run in WAYS:
        assert run(tensors).item() == 3 * sum(i * i for i in range(count))  # whole numbers: exact


def test_a_square_is_exact_and_does_not_overflow(interpreted: None) -> None:
    info = torch.finfo(torch.float32)
    for value in (info.max, info.smallest_normal * info.eps, 1 + info.eps):
        x = torch.full((1,), value, dtype=torch.float32)
        square = Fraction(x.item()) ** 2
        for run in WAYS:
            assert Fraction(run([x]).item()) == square


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_says_that_something_is_not_finite(interpreted: None, value: float) -> None:
    x = torch.ones(5000)
    x[4999] = value
    for run in WAYS:
        assert not math.isfinite(run([torch.ones(5), x]).item())


def test_bits_of_cpp_are_those_of_the_lengths_alone() -> None:
    """On any number of threads and at any address: by parts of 65536, in 32 sums each."""
    x = some(5 * 65536 + 77, torch.float32, skip=1)
    want = 0.0
    for part in x.double().square().split(65536):
        padded = torch.nn.functional.pad(part, (0, -len(part) % 32)).view(-1, 32)
        sums = padded.cumsum(0)[-1]  # one by one
        while len(sums) > 1:
            sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
        want += sums.item()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert squared_norm([x]).item() == want
            assert squared_norm([x.clone()]).item() == want
    finally:
        torch.set_num_threads(before)


def test_programs_share_the_chunks_and_the_last_one_leaves_the_scratch_as_it_was(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[squared_norm_triton.__module__]
    x = [torch.ones(n) for n in (5, 3 * BLOCK, BLOCK + 1, 0, 7)]  # 7 chunks
    for programs in (1, 2, 3, 6, 7, 8):
        monkeypatch.setattr(module, "PROGRAMS", programs)
        scratch = torch.full((programs,), -1.0, dtype=torch.float64)
        monkeypatch.setattr(module, "_scratch", lambda *_, here=scratch: here)
        for count in (5, 1, 3):
            assert squared_norm_triton(x[:count]).item() == sum(map(len, x[:count]))
            assert (scratch == -1).all()


def test_mixed_dtypes(interpreted: None) -> None:
    tensors = [torch.full((5,), 2.0, dtype=dtype) for dtype in FLOATS]
    assert squared_norm(tensors).item() == 80
    assert squared_norm_triton(tensors).item() == 80


def test_refuses() -> None:
    for run in WAYS:
        with pytest.raises(ValueError, match=r"tensor 1 is torch\.int32"):
            run([torch.ones(2), torch.ones(2).int()])
        with pytest.raises(ValueError, match="one device"):
            run([torch.ones(2), torch.ones(2, device="meta")])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_against_exact(dtype: torch.dtype) -> None:
    tensors = [some(elems, dtype, skip=elems % 2) for elems in LENGTHS]
    want, copies = exact(tensors), [there(x) for x in tensors]
    first = squared_norm(copies)
    assert abs(first.item() - want) <= bound(tensors, want)
    assert squared_norm(copies).item() == first.item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_on_several_streams() -> None:
    elems = 2 * PROGRAMS * BLOCK + 5  # several chunks for each program
    ones = torch.ones(elems, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    sums = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                sums.append(squared_norm([ones]))
    torch.cuda.synchronize()
    assert {x.item() for x in sums} == {elems}
