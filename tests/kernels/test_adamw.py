"""adamw: against float64 and torch; all implementations give the same bits, in any slice."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

from ringdp.kernels import adamw, host
from ringdp.kernels.adamw import Factors, adamw_torch, adamw_triton
from tests.kernels.inputs import LENGTHS, MANY, random_floats, same_bits, same_numbers

# The interpreter computes with numpy, which warns of overflows that the tests cause on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

U = torch.finfo(torch.float32).eps / 2
FACTORS = Factors(0.99999, 0.1, 0.999, 0.001, -1e-3 / 0.271, math.sqrt(0.003), 1e-8)


class State(NamedTuple):
    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def copy(self) -> State:
        return State(*(x.clone() for x in self))

    def part(self, first: int, last: int) -> State:
        return State(*(x[first:last] for x in self))


def random_state(elems: int, seed: int = 5) -> State:
    g = torch.Generator().manual_seed(seed)

    def random_floats() -> torch.Tensor:
        return torch.randn(elems, generator=g) * torch.exp2(
            torch.randint(-12, 4, (elems,), generator=g)
        )

    return State(random_floats(), random_floats(), random_floats(), random_floats().square())


def adamw_cpp(*given: Any) -> None:
    assert host.adamw(*given, torch.get_num_threads())


def step(s: State, t: int = 3, copy: torch.Tensor | None = None) -> None:
    adamw(*s, step=t, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, copy=copy)


def gamma(k: int) -> float:
    """The bound for k roundings (Higham 2002, §3.1): |relative error| <= ku/(1 − ku)."""
    return k * U / (1 - k * U)


@pytest.mark.parametrize("t", [1, 3, 1000])
def test_reference_is_within_the_error_bound(t: int) -> None:
    got = random_state(10007)
    p, g, m, v = (x.double() for x in got)
    step(got, t)
    m1 = m + (1 - 0.9) * (g - m)
    v1 = 0.999 * v + (1 - 0.999) * g * g
    denominator = (v1 / (1 - 0.999**t)).sqrt() + 1e-8
    size = 1e-3 / (1 - 0.9**t)
    want = (1 - 1e-3 * 0.01) * p - size * m1 / denominator
    # Roundings on each path; rounding a factor to float32 counts as one.
    m_bound = gamma(4) * ((1 - 0.9) * (g - m)).abs() + gamma(1) * m.abs()
    v_bound = gamma(4) * v1  # relative, since all terms are non-negative
    # Roundings of the update: v1 4 (halved by √: 2), √ 1, correction 2, ε 2, its own factor, · and
    # / 3.
    update = size * m1.abs() / denominator
    p_bound = (
        gamma(3) * p.abs() + gamma(11) * update + size * m_bound / denominator * (1 + gamma(11))
    )
    assert ((got.exp_avg.double() - m1).abs() <= m_bound).all()
    assert ((got.exp_avg_sq.double() - v1).abs() <= v_bound).all()
    assert ((got.param.double() - want).abs() <= p_bound).all()


def test_20_steps_stay_within_the_error_bound_of_torchs() -> None:
    """20 steps; per step both err by at most 4 roundings of p and 12 of the update."""
    got = random_state(1000)
    got.exp_avg.zero_()
    got.exp_avg_sq.zero_()
    theirs = got.param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.01)
    for t in range(1, 21):
        got.grad.copy_(torch.cos(torch.arange(1000.0) * t) + 0.1)
        theirs.grad = got.grad.clone()
        optimizer.step()
        step(got, t)
    # The updates sum to at most 20 · lr · (1 − β1)/√(1 − β2) (Kingma & Ba 2015, §2.1).
    travelled = 20 * 1e-3 * 0.1 / math.sqrt(0.001)
    bound = 2 * (20 * gamma(4) * (got.param.abs() + travelled) + gamma(20 * 12) * travelled)
    assert ((got.param - theirs.detach()).abs() <= bound).all()


@pytest.mark.parametrize("elems", LENGTHS)
def test_kernel_equals_reference(interpreted: None, elems: int) -> None:
    want = random_state(elems)
    by_triton, by_cpp = want.copy(), want.copy()
    adamw_torch(*want, None, FACTORS)
    adamw_triton(*by_triton, None, FACTORS)
    adamw_cpp(*by_cpp, None, FACTORS)
    assert all(map(same_bits, by_triton, want))
    assert all(map(same_bits, by_cpp, want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_copy_is_the_rounded_new_parameter(interpreted: None, dtype: torch.dtype) -> None:
    """Views at odd addresses; inf, nan, zeros and subnormals are among the gradients."""
    start = random_state(2501)
    start.grad[:51] = random_floats(51, torch.float32, special=True)
    want, without = start.copy(), start.copy()
    copy = torch.full((2501,), torch.nan, dtype=dtype)
    adamw_torch(*want.part(1, 2501), copy[1:], FACTORS)
    adamw_torch(*without.part(1, 2501), None, FACTORS)
    assert all(map(same_bits, want, without))
    assert torch.equal(copy[1:].view(torch.int16), want.param[1:].to(dtype).view(torch.int16))
    for launch in (adamw_triton, adamw_cpp):
        got, other = start.copy(), torch.full((2501,), torch.nan, dtype=dtype)
        launch(*got.part(1, 2501), other[1:], FACTORS)
        assert all(map(same_bits, got, want))
        assert same_numbers(other, copy)


def test_adamw_writes_a_copy_and_refuses_a_wrong_one() -> None:
    state, copy = random_state(100), torch.empty(100, dtype=torch.bfloat16)
    step(state, copy=copy)
    assert torch.equal(copy, state.param.bfloat16())
    for wrong in (torch.empty(100), torch.empty(99).half(), torch.empty(200).half()[::2]):
        with pytest.raises(ValueError, match="copy must be"):
            step(state, copy=wrong)


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_slicing(threads: int) -> None:
    """The whole buffer, random slices of it, and single elements give the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        elems = MANY
        start = random_state(elems)
        whole = start.copy()
        step(whole)
        for seed in range(3):
            g = torch.Generator().manual_seed(seed)
            cuts = torch.randint(1, elems, (60,), generator=g).tolist()
            # slices shorter than a SIMD register
            near = torch.randint(1, 200, (60,), generator=g).tolist()
            cuts = sorted({0, elems, *cuts, *near})
            pieces = start.copy()
            for first, last in pairwise(cuts):
                step(pieces.part(first, last))
            assert all(map(same_bits, pieces, whole))
        ones = start.copy()
        for i in range(100):
            step(ones.part(i, i + 1))
        assert all(map(same_bits, ones.part(0, 100), whole.part(0, 100)))
    finally:
        torch.set_num_threads(before)


def test_each_operation_is_correctly_rounded() -> None:
    """The reference's operations are recomputed in float64 and rounded to float32 one by one."""
    got = random_state(5000)
    k = [float(torch.tensor(f)) for f in FACTORS]
    decay, fresh1, beta2, fresh2, size, correction, eps = k

    def r(x: torch.Tensor) -> torch.Tensor:
        return x.float().double()  # exact for + − · / √: 53 >= 2 · 24 + 2 (Figueroa 1995)

    p, g, m, v = (x.double() for x in got)
    m = r(m + r(r(g - m) * fresh1))
    v = r(r(v * beta2) + r(r(g * fresh2) * g))
    p = r(r(p * decay) + r(r(m * size) / r(r(r(v.sqrt()) / correction) + eps)))
    adamw_torch(*got, None, FACTORS)
    assert all(map(same_bits, got, State(p.float(), got.grad, m.float(), v.float())))


def test_autograd_sees_the_in_place_change() -> None:
    state = random_state(4)
    state.param.requires_grad_()
    squared = state.param.square().sum()
    with torch.no_grad():
        step(State(state.param.detach(), *state[1:]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_empty_tensors_are_accepted() -> None:
    step(random_state(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": torch.zeros(3)}, "grad is"),
        ({"exp_avg": torch.zeros(4, device="meta")}, "exp_avg is"),
        ({"grad": torch.zeros(4).double()}, "float64"),
        ({"grad": torch.zeros(8)[::2]}, "strides"),
    ],
)
def test_wrong_tensors_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(random_state(4)._replace(**change))


def test_step_0_is_refused() -> None:
    with pytest.raises(ValueError, match="counts from 1"):
        step(random_state(4), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("skip", [0, 1])  # 1: an odd address
@pytest.mark.parametrize("elems", [1, 16, 17, 1024, 2500, 1 << 20])
def test_gpu_equals_cpu(elems: int, skip: int, dtype: torch.dtype | None) -> None:
    start = random_state(elems + skip)
    if elems > 51:
        start.grad[skip : skip + 51] = random_floats(51, torch.float32, special=True)
    want, got = start.part(skip, elems + skip), State(*(x.cuda() for x in start))
    got = got.part(skip, elems + skip)
    copy = None if dtype is None else torch.empty(elems + skip, dtype=dtype)[skip:]
    there = None if copy is None else torch.empty(elems + skip, dtype=dtype, device="cuda")[skip:]
    for t in (1, 2, 3):  # the third call repeats the second's launch
        for state, rounded in ((want, copy), (got, there)):
            step(state, t, rounded)
    assert all(map(same_numbers, (x.cpu() for x in got), want))
    if copy is not None and there is not None:
        assert same_numbers(there.cpu(), copy)
