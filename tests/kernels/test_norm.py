"""squared_norm: every implementation is within its docstring's error bound of the exact sum."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import pytest
import torch

from ringdp.kernels import norm, squared_norm
from ringdp.kernels.norm import (
    BLOCK,
    PROGRAMS,
    squared_norm_torch,
    squared_norm_triton,
)
from ringdp.kernels.precision import FLOATS
from tests.kernels.inputs import LENGTHS, copy_to_gpu, random_floats
from tests.kernels.test_host import Made

U = 2.0**-53
IMPLEMENTATIONS = (squared_norm, squared_norm_torch, squared_norm_triton)


def exact(tensors: list[torch.Tensor]) -> float:
    """The sum of squares, rounded once."""
    return math.fsum(v * v for x in tensors for v in x.double().flatten().tolist())


def bound(tensors: list[torch.Tensor], value: float) -> float:
    """γ(n − 1) for a sum of non-negative terms, and half an ulp for `exact`. A float64's square is
    rounded too, once by the kernel and once in `exact`."""
    k = (sum(x.numel() for x in tensors) + 2) * U
    return k / (1 - k) * value + U * value


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_implementations_are_within_the_error_bound(
    interpreted: None, dtype: torch.dtype
) -> None:
    tensors = [
        random_floats(BLOCK + 100, dtype),
        random_floats(BLOCK, dtype, skip=1),
        random_floats(BLOCK, dtype),
        random_floats(4000, dtype).view(40, 100)[::3, ::2],
        random_floats(0, dtype),
        random_floats(1, dtype).squeeze(0),
    ]
    want = exact(tensors)
    for run in IMPLEMENTATIONS:
        got = run(tensors)
        assert (got.dtype, got.shape) == (torch.float64, ())
        assert abs(got.item() - want) <= bound(tensors, want)


@pytest.mark.parametrize("elems", LENGTHS)
def test_all_lengths_are_within_the_error_bound(interpreted: None, elems: int) -> None:
    x = [random_floats(elems, torch.float32)]
    want = exact(x)
    for run in IMPLEMENTATIONS:
        assert abs(run(x).item() - want) <= bound(x, want)


def test_the_tensors_that_are_kept_are_those_that_were_read(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sequence that makes its tensors when asked. A repeated launch has their addresses."""
    kept, read = set[int](), set[int]()

    def keep(
        tensors: list[torch.Tensor], _: object, __: object, tables: list[torch.Tensor]
    ) -> None:
        kept.update(x.data_ptr() for x in tensors)
        read.update(tables[0][:, 0].tolist())  # each tensor is several chunks

    monkeypatch.setattr(norm._repeats, "keep", keep)
    squared_norm_triton(Made())
    assert kept
    assert kept <= read


@pytest.mark.parametrize("count", [0, 1, 500])
def test_sums_over_0_1_and_500_tensors_are_exact(interpreted: None, count: int) -> None:
    tensors = [torch.full((3,), float(i)) for i in range(count)]
    for run in IMPLEMENTATIONS:
        # sums of small integers are exact
        assert run(tensors).item() == 3 * sum(i * i for i in range(count))


def test_squares_are_exact_and_do_not_overflow(interpreted: None) -> None:
    info = torch.finfo(torch.float32)
    for value in (info.max, info.smallest_normal * info.eps, 1 + info.eps):
        x = torch.full((1,), value, dtype=torch.float32)
        square = Fraction(x.item()) ** 2
        for run in IMPLEMENTATIONS:
            assert Fraction(run([x]).item()) == square


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_inf_and_nan_give_a_nonfinite_norm(interpreted: None, value: float) -> None:
    x = torch.ones(5000)
    x[4999] = value
    for run in IMPLEMENTATIONS:
        assert not math.isfinite(run([torch.ones(5), x]).item())


def test_bits_of_cpp_depend_on_lengths_only() -> None:
    """The sum depends on lengths only: parts of 32768, each in 32 partial sums, whatever the number
    of threads or the address."""
    x = random_floats(5 * 32768 + 77, torch.float32, skip=1)
    want = 0.0
    for part in x.double().square().split(32768):
        padded = torch.nn.functional.pad(part, (0, -len(part) % 32)).view(-1, 32)
        sums = padded.cumsum(0)[-1]  # adds row by row
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


def test_any_number_of_programs_gives_the_sum_and_resets_the_scratch(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[squared_norm_triton.__module__]
    x = [torch.ones(n) for n in (5, 3 * BLOCK, BLOCK + 1, 0, 7)]  # 7 chunks
    for programs in (1, 2, 3, 6, 7, 8):
        monkeypatch.setattr(module, "PROGRAMS", programs)
        scratch = torch.full((programs,), -torch.inf, dtype=torch.float64)
        monkeypatch.setattr(module, "_scratch", lambda *_, here=scratch: here)
        for count in (5, 1, 3):
            assert squared_norm_triton(x[:count]).item() == sum(map(len, x[:count]))
            assert (scratch == -torch.inf).all()


def test_mixed_dtypes_are_accepted(interpreted: None) -> None:
    tensors = [torch.full((5,), 2.0, dtype=dtype) for dtype in FLOATS]
    assert squared_norm(tensors).item() == 80
    assert squared_norm_triton(tensors).item() == 80


def test_the_default_device_is_not_that_of_the_result() -> None:
    x = torch.ones(4)
    with torch.device("meta"):
        assert squared_norm([x]).item() == 4


def test_wrong_dtypes_and_devices_are_refused() -> None:
    for run in IMPLEMENTATIONS:
        with pytest.raises(ValueError, match=r"tensor 1 is torch\.int32"):
            run([torch.ones(2), torch.ones(2).int()])
        with pytest.raises(ValueError, match="one device"):
            run([torch.ones(2), torch.ones(2, device="meta")])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_is_within_the_error_bound(dtype: torch.dtype) -> None:
    tensors = [random_floats(elems, dtype, skip=elems % 2) for elems in LENGTHS]
    want, copies = exact(tensors), [copy_to_gpu(x) for x in tensors]
    first = squared_norm(copies)
    assert abs(first.item() - want) <= bound(tensors, want)
    assert squared_norm(copies).item() == first.item()


@pytest.mark.gpu
def test_inf_and_nan_of_any_program_reach_the_sum() -> None:
    """The last program waits for the others also where its sum of their sums is already nan."""
    ones = torch.ones(3 * PROGRAMS * BLOCK, device="cuda")
    for at in (0, BLOCK, len(ones) - 1):
        for value in (torch.inf, torch.nan):
            ones[at] = value
            assert [squared_norm([ones]).item() for _ in range(50)] == pytest.approx(
                [value] * 50, nan_ok=True
            )
        ones[at] = 1
        assert squared_norm([ones]).item() == len(ones)


@pytest.mark.gpu
def test_concurrent_streams_do_not_share_scratch() -> None:
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
