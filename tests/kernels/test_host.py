"""The kernels in C++ equal their references, on any number of threads, and leave other tensors to
torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.kernels import (
    adamw,
    flatten,
    fold,
    host,
    squared_norm,
    stochastic_round,
    unflatten,
    unscale,
)
from ringdp.kernels.flatten import flatten_torch
from ringdp.kernels.fold import INTEGERS, fold_torch
from ringdp.kernels.precision import wide_dtype
from ringdp.kernels.stochastic import FIRST, SECOND, keys, late, stochastic_round_torch
from ringdp.kernels.unflatten import unflatten_torch
from ringdp.kernels.unscale import unscale_torch
from tests.kernels.inputs import (
    LENGTHS,
    MANY,
    PAIRS,
    OnSecondGpu,
    bucket_tensors,
    random_floats,
    same_bits,
    same_numbers,
)

THREADS = 3


@pytest.fixture(params=[1, THREADS])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("scale", [1.0, -0.375, 0.1])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_flatten_and_unflatten(
    source: torch.dtype, target: torch.dtype, scale: float, threads: int
) -> None:
    """All lengths at odd addresses, in any order, with gaps between them."""
    lengths = [*LENGTHS, MANY]
    tensors = [random_floats(n, source, skip=n % 2, special=n > 15) for n in lengths]
    ends = torch.tensor([n + n % 3 for n in lengths]).cumsum(0).tolist()
    offsets = [end - n for n, end in zip(lengths, ends, strict=True)][::-1]
    tensors.reverse()
    got, want = (torch.full((ends[-1] + 7,), torch.nan, dtype=target) for _ in range(2))
    flatten_torch(tensors, want, scale, offsets)
    assert host.flatten(tensors, got, offsets, scale, threads)
    assert same_numbers(got, want)
    if (target, source) in PAIRS:
        back, wanted = ([torch.full_like(x, torch.nan) for x in tensors] for _ in range(2))
        unflatten_torch(want, wanted, scale, offsets)
        assert host.unflatten(got, back, offsets, scale, threads)
        assert all(map(same_numbers, back, wanted))


@pytest.mark.parametrize("elems", [*LENGTHS, MANY])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_unscale(source: torch.dtype, target: torch.dtype, elems: int, threads: int) -> None:
    x = random_floats(elems, source, skip=elems % 2)
    for last in (0.5, torch.inf, torch.nan):
        x[-1:] = last
        got, want, flags = (
            torch.empty(elems, dtype=target),
            torch.empty(elems, dtype=target),
            torch.zeros(2, 1),
        )
        unscale_torch(x, want, flags[0], 0.1)
        assert host.unscale(x, got, flags[1], 0.1, threads)
        assert same_numbers(got, want)
        assert flags[0] == flags[1] == float(not want.isfinite().all())


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(("source", "target"), [*PAIRS, *((x, x) for x in INTEGERS)])
def test_fold(source: torch.dtype, target: torch.dtype, ranks: int, threads: int) -> None:
    for elems in (*LENGTHS, MANY):
        if source in INTEGERS:
            info = torch.iinfo(source)
            parts = torch.randint(info.min, info.max, (ranks, elems + 3), dtype=source)
            wide = source
        else:
            parts = random_floats(ranks * (elems + 3), source).view(ranks, elems + 3)
            wide = wide_dtype(source, target)
        for rows, own, at in ((parts, None, 0), (parts[1:], parts[0], ranks // 2)):
            if not len(rows):
                continue
            rows = rows[:, 2 : elems + 2]  # there are gaps between them
            own = None if own is None else own[2 : elems + 2]
            got, want = (torch.zeros(elems, dtype=target) for _ in range(2))
            fold_torch(rows, want, wide, own, at)
            assert host.fold(rows, got, own, at, threads)
            assert same_numbers(got, want)


@pytest.mark.parametrize("offset", [0, 12345, (7 << 32) + 5])
@pytest.mark.parametrize("elems", [*LENGTHS, MANY])
def test_stochastic_round(elems: int, offset: int, threads: int) -> None:
    x = random_floats(elems, torch.float32, skip=elems % 2, special=elems > 15)
    got, want = (torch.empty(elems, dtype=torch.bfloat16) for _ in range(2))
    stochastic_round_torch(x, want, keys(9), offset)
    assert host.stochastic_round(x, got, (*late(keys(9), offset), FIRST, SECOND), threads)
    assert same_numbers(got, want)


ADAMW = {"step": 1, "lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.0}
# Each kernel reads x, float32[elems], and writes to `out`.
CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "flatten": lambda x, out: flatten([x], out, scale=0.5, offsets=[0]),
    "unflatten": lambda x, out: unflatten(x, [out], scale=0.5, offsets=[0]),
    "unscale": lambda x, out: unscale(x, out, torch.zeros(1), scale=0.5),
    "fold": lambda x, out: fold(torch.ones(3, len(x)), out, x),
    "adamw": lambda x, out: adamw(out, x, torch.ones(len(x)), torch.ones(len(x)), **ADAMW),
    "stochastic_round": lambda x, out: stochastic_round(x, out, seed=1),
}


def output(kernel: str, elems: int = 8) -> Tensor:
    return torch.zeros(elems).to(torch.bfloat16 if kernel == "stochastic_round" else torch.float32)


@pytest.mark.parametrize("kernel", CALLS)
def test_tensors_of_another_class_are_left_to_torch(kernel: str) -> None:
    got, want = output(kernel), output(kernel)
    CALLS[kernel](torch.arange(8.0), want)
    CALLS[kernel](torch.arange(8.0).as_subclass(OnSecondGpu), got)
    assert same_bits(got, want)
    assert want.any()


@pytest.mark.parametrize("left", [0, 12])
@pytest.mark.parametrize("kernel", CALLS)
def test_memory_that_was_freed_or_cut_is_not_read(kernel: str, left: int) -> None:
    """The tensors are too large for another to have been checked at the cut one's address."""

    def cut(x: Tensor) -> Tensor:
        x.untyped_storage().resize_(left)
        return x

    whole = torch.ones(MANY), output(kernel, MANY)
    for x, out in ((cut(torch.ones(MANY)), whole[1]), (whole[0], cut(output(kernel, MANY)))):
        with pytest.raises(ValueError, match=f"a storage of {left} bytes is not in memory"):
            CALLS[kernel](x, out)
    for call in (
        lambda x: flatten([x], torch.ones(MANY), offsets=[0]),
        lambda x: squared_norm([x]),
    ):
        with pytest.raises(ValueError, match=f"a storage of {left} bytes is not in memory"):
            call(cut(torch.ones(MANY)[::2]))


@pytest.mark.parametrize("kernel", CALLS)
def test_tensors_without_memory_are_left_to_torch(kernel: str) -> None:
    with torch.device("meta"):
        CALLS[kernel](torch.ones(8), output(kernel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_strided_tensors_are_copied_for_the_kernel(
    scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, offsets, elems = bucket_tensors(dtype)
    got, want = (torch.full((elems,), torch.nan, dtype=dtype) for _ in range(2))
    flatten_torch(tensors, want, scale, offsets)
    back = [torch.zeros_like(x) for x in tensors]  # as strided as those
    before = [x._version for x in back]
    by_torch = list[Tensor]()
    for module in ("flatten", "unflatten"):
        real = sys.modules[f"ringdp.kernels.{module}"].scaled_copy

        def scaled_copy(x: Tensor, out: Tensor, by: float, real: Any = real) -> None:
            by_torch.append(x)
            real(x, out, by)

        monkeypatch.setattr(sys.modules[f"ringdp.kernels.{module}"], "scaled_copy", scaled_copy)
    flatten(tensors, got, scale=scale, offsets=offsets)
    unflatten(got, back, scale=1 / scale, offsets=offsets)
    assert same_bits(got, want)
    assert all(map(torch.equal, back, tensors))
    assert all(x._version > version for x, version in zip(back, before, strict=True))
    assert not by_torch


class Made(Sequence[Tensor]):
    """Makes each of 4 tensors when asked for it, and keeps none."""

    def __init__(self, length: int = 4) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: Any) -> Any:
        if i >= 4:
            raise IndexError
        return torch.full((MANY,), float(i))


def test_sequences_of_any_class_keep_their_tensors() -> None:
    out, places = torch.empty(4 * MANY), torch.arange(4) * MANY
    flatten(Made(), out, offsets=places)
    assert torch.equal(out.view(4, MANY), torch.arange(4.0)[:, None].expand(4, MANY))
    assert squared_norm(Made()) == (0 + 1 + 4 + 9) * MANY
    parts = {i: torch.empty(MANY) for i in range(4)}
    unflatten(out, parts.values(), offsets=dict.fromkeys(places.tolist()).keys())
    assert all((x == i).all() for i, x in parts.items())
    with pytest.raises(TypeError, match="has no len"):
        unflatten(out, iter(parts.values()), offsets=places)
    with pytest.raises(ValueError, match="argument 2 is"):
        flatten(Made(length=2), out, offsets=places[:2])


def test_numbers_that_are_too_large_are_errors_of_their_own() -> None:
    x, found = torch.ones(8), torch.zeros(1)
    for call in (
        lambda: flatten([x], x, scale=10**400, offsets=[0]),
        lambda: unflatten(x, [x], scale=10**400, offsets=[0]),
        lambda: unscale(x, x, found, scale=10**400),
    ):
        with pytest.raises(ValueError, match="scale must be finite"):
            call()
    with pytest.raises(ValueError, match="does not fit in 8 elements"):
        flatten([x], x, offsets=[1 << 70])
    with pytest.raises(ValueError, match="cannot come after"):
        fold(x[None], torch.ones(8), x, 1 << 70)


@pytest.mark.parametrize("elems", [50, MANY])
def test_an_output_that_overlaps_its_input_elsewhere_is_left_to_torch(elems: int) -> None:
    x = random_floats(2 * elems, torch.float32)
    want = torch.empty(elems)
    fold(x.view(2, elems), want)
    fold(x.view(2, elems), x[1 : elems + 1])
    assert same_bits(x[1 : elems + 1], want)
    own = x[:elems].clone()
    fold(x.view(2, elems), want, own, 1)
    fold(x.view(2, elems), x[1 : elems + 1], own, 1)
    assert same_bits(x[1 : elems + 1], want)
    rounded = torch.empty(elems, dtype=torch.bfloat16)
    stochastic_round(x[:elems], rounded, seed=1)
    inside = x.view(torch.bfloat16)[3 : elems + 3]
    stochastic_round(x[:elems], inside, seed=1)
    assert same_bits(inside, rounded)
    for out in (x[1 : elems + 1], inside):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            unscale(x[:elems], out, torch.zeros(1), scale=0.5)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("kernel", CALLS)
def test_compiled_code_calls_it(kernel: str) -> None:
    got, want = output(kernel), output(kernel)
    CALLS[kernel](torch.arange(8.0), want)
    torch.compile(CALLS[kernel], backend="eager")(torch.arange(8.0), got)
    assert same_bits(got, want)


def test_compiled_code_calls_squared_norm() -> None:
    x = torch.arange(8.0)
    assert torch.compile(squared_norm, backend="eager")([x]) == squared_norm([x]) == 140


@pytest.mark.parametrize("kernel", CALLS)
def test_a_write_is_seen_by_autograd(kernel: str) -> None:
    x, out = torch.ones(8, requires_grad=True), output(kernel)
    before = out._version
    saved = x * out  # keeps `out` for its backward
    CALLS[kernel](torch.arange(8.0), out)
    assert out._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_subnormals_are_kept_where_torch_flushes_them() -> None:
    x = random_floats(1000, torch.float16, special=True)
    got, want = torch.empty(1000), torch.empty(1000)
    flatten([x], want, scale=0.5, offsets=[0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush them")
    try:
        flatten([x], got, scale=0.5, offsets=[0])
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(got, want)


def test_a_forked_child_works_on_one_thread() -> None:
    """torch's own threads are not there, and its operations wait for them for ever."""
    x, out = torch.ones(MANY), torch.empty(MANY)
    assert host.flatten([x], out, [0], 2.0, THREADS)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if host.flatten([x], out, [0], 3.0, THREADS) and out[-1].item() == 3 else 1)
    assert os.waitpid(pid, 0)[1] == 0


OPENMP = """
#include <stdio.h>
void GOMP_parallel(void (*act)(void*), void* data, unsigned threads, unsigned flags) {
  printf("%u threads asked for\\n", threads);
  act(data);
}
int omp_get_thread_num(void) { return 0; }
"""


def test_a_preloaded_openmp_is_used_as_by_torch(tmp_path: Path) -> None:
    """Some preload Intel's. This one has one thread only, which does all the work."""
    library = tmp_path / "openmp.so"
    compiler = [os.environ.get("CXX", "g++"), "-x", "c", "-", "-shared", "-fPIC", "-o", library]
    subprocess.run(compiler, input=OPENMP, encoding="utf-8", check=True)
    code = (
        "import torch; from ringdp.kernels import host; "
        f"x, out = torch.ones({MANY}), torch.zeros({MANY}); "
        f"print(host.flatten([x], out, [0], 2.0, {THREADS}), (out == 2).all().item())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert f"{THREADS} threads asked for" in found.stdout
    assert "True True" in found.stdout
