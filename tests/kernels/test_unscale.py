"""unscale: rounds as flatten, flags what torch.isfinite does, and the kernel equals the
reference."""

from __future__ import annotations

import pytest
import torch

from ringdp.kernels import flatten, unscale
from ringdp.kernels.precision import FLOATS
from ringdp.kernels.unscale import unscale_torch, unscale_triton
from tests.kernels.inputs import LENGTHS, MANY, PAIRS, copy_to_gpu, random_floats, same_bits

TENTH = float(torch.tensor(0.1))  # the interpreter passes floats as float32
# The interpreter computes with numpy, which warns of overflows that the tests cause on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_reference_rounds_as_flatten_and_flags_as_isfinite(
    source: torch.dtype, target: torch.dtype, special: bool
) -> None:
    x, found = random_floats(1000, source, special=special), torch.zeros(1)
    got, want = torch.empty(1000, dtype=target), torch.empty(1000, dtype=target)
    unscale(x, got, found, scale=0.1)
    flatten([x], want, scale=0.1, offsets=[0])
    assert same_bits(got, want)
    assert found.item() == (not want.isfinite().all())


@pytest.mark.parametrize(
    ("source", "target"), [p for p in PAIRS if torch.float32 in p or p[0] == p[1]]
)
@pytest.mark.parametrize("special", [False, True])
def test_kernel_equals_reference(
    interpreted: None, source: torch.dtype, target: torch.dtype, special: bool
) -> None:
    x = random_floats(2500, source, skip=1, special=special)
    got, want = torch.empty(2500, dtype=target), torch.empty(2500, dtype=target)
    flags = torch.zeros(2, 1)
    unscale_torch(x, want, flags[0], TENTH)
    unscale_triton(x, got, flags[1], TENTH)
    assert same_bits(got, want)
    assert flags[0].item() == flags[1].item() == (not want.isfinite().all())


@pytest.mark.parametrize("elems", LENGTHS)
def test_kernel_equals_reference_for_all_lengths(interpreted: None, elems: int) -> None:
    """A nan in the last element is found, wherever blocks and launches end."""
    x = random_floats(elems, torch.float32)
    for last in (0.5, torch.nan):
        x[-1:] = last
        got, want = torch.empty(elems), torch.empty(elems)
        flags = torch.zeros(2, 1)
        unscale_torch(x, want, flags[0], 0.25)
        unscale_triton(x, got, flags[1], 0.25)
        assert same_bits(got, want)
        assert flags[0].item() == flags[1].item() == (elems > 0 and last != last)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_one_nonfinite_element_sets_the_flag_for_good(value: float) -> None:
    elems = MANY
    x, found = torch.ones(elems), torch.zeros(1)
    for place in (0, elems // 2, elems - 1):
        x[place] = value
        unscale(x, x, found, scale=1.0)  # in place
        assert found.item() == 1
        x[place] = 0.0
        unscale(x, x, found, scale=1.0)
        assert found.item() == 1  # the flag of an earlier bucket stays set
        found.zero_()
        unscale(x, x, found, scale=1.0)
        assert found.item() == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [0.1, 1.0, -2.0])
def test_in_place_has_the_same_bits_and_flag(dtype: torch.dtype, scale: float) -> None:
    for x in (random_floats(1001, dtype), torch.full((3,), torch.finfo(dtype).max, dtype=dtype)):
        out, flags = torch.empty_like(x), torch.zeros(2, 1)
        unscale(x, out, flags[0], scale=scale)
        unscale(x, x, flags[1], scale=scale)
        assert same_bits(x, out)
        assert flags[0].item() == flags[1].item() == (not out.isfinite().all())


def test_an_overflow_of_the_cast_sets_the_flag() -> None:
    found = torch.zeros(1)
    unscale(torch.full((3,), 65536.0), torch.empty(3, dtype=torch.float16), found, scale=0.5)
    assert found.item() == 0
    unscale(torch.full((3,), 65536.0), torch.empty(3, dtype=torch.float16), found, scale=1.0)
    assert found.item() == 1


@pytest.mark.parametrize(
    ("x", "out", "found", "scale", "message"),
    [
        (torch.ones(4), torch.ones(3), torch.zeros(1), 1.0, "contiguous and"),
        (torch.ones(2, 2), torch.ones(2, 2), torch.zeros(1), 1.0, "contiguous and"),
        (torch.ones(8)[::2], torch.ones(4), torch.zeros(1), 1.0, "strides"),
        (torch.ones(4), torch.ones(4), torch.zeros(2), 1.0, "found must be"),
        (torch.ones(4), torch.ones(4), torch.zeros(1).int(), 1.0, "found must be"),
        (torch.ones(4), torch.ones(4), torch.zeros(1, device="meta"), 1.0, "meta"),
        (torch.ones(4), torch.ones(4), torch.zeros(1), float("nan"), "finite"),
        (torch.ones(4).int(), torch.ones(4), torch.zeros(1), 1.0, "not supported"),
        (torch.ones(4).double(), torch.ones(4).half(), torch.zeros(1), 1.0, "round twice"),
    ],
)
def test_wrong_arguments_are_refused(
    x: torch.Tensor, out: torch.Tensor, found: torch.Tensor, scale: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        unscale(x, out, found, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("elems", [*LENGTHS, 1 << 20])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_gpu_equals_cpu(source: torch.dtype, target: torch.dtype, elems: int) -> None:
    for special in (False, True) if elems > 15 else (False,):
        x = random_floats(elems, source, skip=elems % 2, special=special)
        want, flag = torch.empty(elems, dtype=target), torch.zeros(1)
        copy, got, found = copy_to_gpu(x), want.cuda(), flag.cuda()
        for scale in (0.1, 0.2):  # the second call repeats the first's launch
            unscale(x, want, flag, scale=scale)
            unscale(copy, got, found, scale=scale)
            assert found.item() == flag.item()
            assert torch.equal(got.cpu().nan_to_num(), want.nan_to_num())
