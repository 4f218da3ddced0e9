"""The code that Triton compiles for sm_90 gives the references' bits, executed by `ptx`.

Lengths and addresses take every path through a kernel, and every launch is repeated from the cache
of `jit`. These are the GPU tests on fewer cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ringdp.kernels.adamw import adamw_torch, adamw_triton
from ringdp.kernels.flatten import flatten_torch, flatten_triton
from ringdp.kernels.fold import fold_torch, fold_triton
from ringdp.kernels.jit import Kernel
from ringdp.kernels.norm import BLOCK, PROGRAMS, squared_norm_triton
from ringdp.kernels.precision import wide_dtype
from ringdp.kernels.stochastic import keys, stochastic_round_torch, stochastic_round_triton
from ringdp.kernels.unflatten import unflatten_torch, unflatten_triton
from ringdp.kernels.unscale import unscale_torch, unscale_triton
from tests.kernels.executed import execute
from tests.kernels.inputs import LENGTHS, random_floats, same_bits, same_numbers
from tests.kernels.test_adamw import FACTORS, State, random_state
from tests.kernels.test_fold import random_parts

if TYPE_CHECKING:
    import triton.language as tl

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SOME = [(F32, F32), (BF16, BF16), (BF16, F32)]
OTHERS = [(F32, F16), (F32, F64), (F64, F32), (F64, F64)]
PAIRS = [*SOME, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in OTHERS)]
SHORT = [pytest.param(1, marks=pytest.mark.exhaustive), 17, 2500]

pytestmark = pytest.mark.usefixtures("executed")


@pytest.mark.parametrize("elems", SHORT)
@pytest.mark.parametrize(("source", "target"), [*PAIRS, (torch.int8, torch.int8)])
def test_fold(source: torch.dtype, target: torch.dtype, elems: int) -> None:
    """Also of two ranks, where the compiler might contract the float32 sum into one of 16 bits."""
    wide = target if source == target == torch.int8 else wide_dtype(source, target)
    for ranks, at in ((2, None), (6, None), (6, 0), (6, 5)):
        parts, want = random_parts(ranks, elems, source), torch.empty(elems, dtype=target)
        fold_torch(parts, want, wide)
        own = None if at is None else parts[at].clone()
        others = parts[1:] if at == 0 else parts[: ranks if at is None else at]
        for _ in range(2):
            got = torch.zeros(elems, dtype=target)
            fold_triton(others, got, wide, own, at or 0)
            assert same_bits(got, want)


@pytest.mark.parametrize("at", [None, 0, 1])
def test_two_bfloat16_are_not_added_in_float16(at: int | None) -> None:
    """Their sum may fit into float16 where they do not."""
    parts = torch.tensor([[70000.0] * 17, [-60000.0] * 17], dtype=BF16)
    got, want = torch.zeros(17, dtype=F16), parts.float().sum(0).half()
    own = None if at is None else parts[at]
    fold_triton(parts if at is None else parts[1 - at : 2 - at], got, F32, own, at or 0)
    assert same_bits(got, want)


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_flatten_and_unflatten(source: torch.dtype, target: torch.dtype, skip: int) -> None:
    """All lengths in one launch, with gaps between them, at aligned and unaligned addresses."""
    sizes = [*(n for n in LENGTHS if n < 5000), 18, 48, 4096 + 16]
    tensors = [random_floats(n, source, skip=skip * (n % 2), special=n > 15) for n in sizes]
    offsets = [16 + sum(sizes[:i]) + 16 * i for i in range(len(sizes))]
    got, want = (torch.full((sum(sizes) + 200,), torch.nan, dtype=target) for _ in range(2))
    back, wanted = ([torch.empty_like(x) for x in tensors] for _ in range(2))
    for scale in (0.1, -0.375):
        flatten_torch(tensors, want, scale, offsets)
        flatten_triton(tensors, got, scale, offsets)
        assert same_numbers(got, want)
        unflatten_torch(want, wanted, scale, offsets)
        unflatten_triton(want, back, scale, offsets)
        assert all(map(same_numbers, back, wanted))


@pytest.mark.parametrize("elems", SHORT)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_unscale(source: torch.dtype, target: torch.dtype, elems: int) -> None:
    for special in (False, True) if elems > 15 else (False,):
        x = random_floats(elems, source, skip=elems % 2, special=special)
        got, want = (torch.empty(elems, dtype=target) for _ in range(2))
        found, flag = torch.zeros(1), torch.zeros(1)
        for scale in (0.1, 0.2):
            unscale_torch(x, want, flag, scale)
            unscale_triton(x, got, found, scale)
            assert same_numbers(got, want)
            assert found.item() == flag.item()


@pytest.mark.parametrize("elems", SHORT)
def test_stochastic_round(elems: int) -> None:
    for skip, offset in ((0, 2**40 + 3), (1, 2**32 - 20)):
        x = random_floats(elems, F32, skip=skip, special=elems > 15)
        got, want = (torch.empty(elems, dtype=BF16) for _ in range(2))
        for seed in (3, 4):
            stochastic_round_torch(x, want, keys(seed), offset)
            stochastic_round_triton(x, got, keys(seed), offset)
            assert same_bits(got, want)


@pytest.mark.parametrize("dtype", [None, BF16, F16])
@pytest.mark.parametrize("elems", SHORT)
def test_adamw(elems: int, dtype: torch.dtype | None) -> None:
    for skip in (0, 1):
        start = random_state(elems + skip)
        if elems > 51:
            start.grad[skip : skip + 51] = random_floats(51, F32, special=True)
        got, want = (State(*(x.clone() for x in start)).part(skip, elems + skip) for _ in range(2))
        copies = [None if dtype is None else torch.empty(elems, dtype=dtype) for _ in range(2)]
        for _ in range(2):
            adamw_torch(*want, copies[0], FACTORS)
            adamw_triton(*got, copies[1], FACTORS)
        assert all(map(same_numbers, got, want))
        assert dtype is None or same_numbers(*copies)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_squared_norm(dtype: torch.dtype) -> None:
    """Sums of ones are exact: by one program or two, and by all, some of which have two chunks."""
    for elems in (1, BLOCK - 1, BLOCK * (PROGRAMS + 1) + 5):
        x = torch.ones(elems + 1, dtype=dtype)[1:]
        for _ in range(2):
            assert squared_norm_triton([x, x[:7]]).item() == elems + len(x[:7])
            assert squared_norm_triton([x[:7]]).item() == len(x[:7])  # a constant: one chunk


def test_ptx_detects_wrong_hints_and_stray_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong alignment hints and accesses outside tensors, which Triton's interpreter ignores, are
    found."""

    def misled(place: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:  # noqa: N803
        lane = tl.arange(0, BLOCK)
        there = tl.load(place).to(tl.pointer_type(tl.float32))
        tl.store(out + lane, tl.load(tl.multiple_of(there, 16) + lane))

    kernel = Kernel(misled, (), {"num_warps": 1}, capturable=True)
    execute(monkeypatch, [kernel])
    x, out = torch.randn(129), torch.zeros(128)
    aligned, odd = (torch.tensor([part.data_ptr()]) for part in (x, x[1:]))
    kernel.launch(1, aligned, out, BLOCK=128)
    assert torch.equal(out, x[:128])
    with pytest.raises(RuntimeError, match=r"not aligned: ld\.global"):  # as the driver's error
        kernel.launch(1, odd, out, BLOCK=128)
    with pytest.raises(RuntimeError, match=r"in no tensor: st\.global"):
        kernel.launch(1, aligned, out[64:].clone(), BLOCK=128)
