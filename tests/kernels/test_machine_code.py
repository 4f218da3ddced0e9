"""The machine code of the kernels for sm_80, sm_90 and sm_100, compiled without a GPU.

Every access of a full block is 16 bytes wide, nothing spills to local memory, and no operation is
fused, flushed to zero or approximated where the references round.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet

from ringdp.kernels.adamw import BLOCK as ADAMW_BLOCK
from ringdp.kernels.adamw import Factors, adamw_kernel
from ringdp.kernels.compiled import variant_of
from ringdp.kernels.copying import CHUNK, copy_kernel
from ringdp.kernels.fold import BLOCK as FOLD_BLOCK
from ringdp.kernels.fold import fold_kernel
from ringdp.kernels.jit import Kernel, triton_dtype
from ringdp.kernels.norm import BLOCK as NORM_BLOCK
from ringdp.kernels.norm import PROGRAMS, THREADS, squared_norm_kernel
from ringdp.kernels.precision import wide_dtype
from ringdp.kernels.stochastic import BLOCK as STOCHASTIC_BLOCK
from ringdp.kernels.stochastic import FIRST, NAN, SECOND, stochastic_round_kernel
from ringdp.kernels.unscale import unscale_kernel, unscale_triton

triton = pytest.importorskip("triton")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARCHES = [80, 90, 100]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# dtype -> Triton's name in a signature
SHORT = {F16: "fp16", BF16: "bf16", F32: "fp32", F64: "fp64"}


def each_arch_and_row(*rows: tuple[Any, ...]) -> list[ParameterSet]:
    """(arch, *row) pairs in which every arch and every row occurs; all others are `exhaustive`."""
    quick = {(i % len(ARCHES), i % len(rows)) for i in range(max(len(ARCHES), len(rows)))}
    return [
        pytest.param(arch, *row, marks=() if (i, j) in quick else pytest.mark.exhaustive)
        for i, arch in enumerate(ARCHES)
        for j, row in enumerate(rows)
    ]


class Code(NamedTuple):
    ptx: str
    sass: str
    accesses: Counter[str]  # counts of its loads and stores: LDG.E.128, STG.E, LDL, ...
    cubin: Path

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        tool = [TOOLS / "cuobjdump", "-res-usage", self.cubin]
        used = subprocess.run(tool, capture_output=True, encoding="utf-8", check=True).stdout
        return int(re.findall(r"\bREG:(\d+)", used)[0])


def compiled(
    kernel: Kernel,
    arch: int,
    tmp_path: Path,
    arguments: dict[str, str],
    constants: dict[str, Any],
    odd: tuple[str, ...] = (),
) -> Code:
    """Compiles as for padded flat buffers: all arguments but floats and `odd` are multiples of
    16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = arguments | dict.fromkeys(constants, "constexpr")
    constants = {name: triton_dtype(x) for name, x in constants.items()}
    odd += kernel.unspecialized
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(arguments.items())
        if not kind.startswith("fp") and name not in odd
    }
    source = ASTSource(kernel.function, signature, constants, aligned)
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=kernel.options)
    assert variant_of(result, kernel.unspecialized), "the driver could launch it"
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(result.asm["cubin"])
    sass = subprocess.run(
        [TOOLS / "nvdisasm", cubin], capture_output=True, encoding="utf-8", check=True
    ).stdout
    accesses = Counter(re.findall(r"\b(?:LDG|STG|LDL|STL)\b[.\w]*", sass))
    assert accesses, "nvdisasm shows no access to memory at all"
    return Code(result.asm["ptx"], sass, accesses, cubin)


def width(code: Code, kind: str) -> set[int]:
    """The widths in bits of the loads (LDG) or stores (STG) in the code."""
    names = [name for name in code.accesses if name.startswith(kind)]
    return {int(m[1]) if (m := re.search(r"\.[US]?(8|16|64|128)\b", n)) else 32 for n in names}


def count_128(code: Code, kind: str) -> int:
    return sum(n for name, n in code.accesses.items() if name.startswith(kind) and ".128" in name)


def spills(code: Code) -> bool:
    return any(name.startswith(("LDL", "STL")) for name in code.accesses)


@pytest.mark.parametrize(
    ("arch", "ranks", "source", "target"),
    each_arch_and_row(
        *((n, s, t) for s, t in ((F32, F32), (BF16, BF16), (BF16, F32)) for n in (2, 64))
    ),
)
@pytest.mark.parametrize("none", [False, True])
def test_fold(
    source: torch.dtype, target: torch.dtype, ranks: int, none: bool, arch: int, tmp_path: Path
) -> None:
    arguments = {
        "parts": f"*{SHORT[source]}",
        "own": f"*{SHORT[source]}",
        "out": f"*{SHORT[target]}",
        "elems": "i32",
        "stride": "i32",
        "one": "fp32",
    }
    constants = {
        "RANKS": ranks,
        "AT": ranks if none else 1,
        "WIDE": wide_dtype(source, target),
        "BLOCK": FOLD_BLOCK,
    }
    code = compiled(fold_kernel, arch, tmp_path, arguments, constants)
    assert width(code, "LDG") == {128}
    assert width(code, "STG") == {128}
    assert not spills(code)
    assert ".ftz" not in code.ptx


@pytest.mark.parametrize(("arch", "copy"), each_arch_and_row((None,), (BF16,)))
def test_adamw(copy: torch.dtype | None, arch: int, tmp_path: Path) -> None:
    pointers = dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq"), "*fp32")
    pointers["copy"] = f"*{SHORT[copy or F32]}"
    arguments = pointers | {"elems": "i32"} | dict.fromkeys(Factors._fields, "fp32")
    constants = {"COPIES": copy is not None, "BLOCK": ADAMW_BLOCK}
    code = compiled(adamw_kernel, arch, tmp_path, arguments, constants)
    assert width(code, "LDG") == {128}
    assert width(code, "STG") == {128}
    assert not spills(code)
    assert "fma." not in code.ptx
    assert ".ftz" not in code.ptx
    assert set(re.findall(r"(?:div|sqrt|rcp|rsqrt)\.\S+", code.ptx)) == {
        "div.rn.f32",
        "sqrt.rn.f32",
    }


@pytest.mark.parametrize(
    ("arch", "apart", "flat", "into_flat"),
    each_arch_and_row(
        *((F32, F32, True), (F32, BF16, True), (BF16, F32, True)),
        *((BF16, BF16, True), (F16, F16, True), (F64, F64, True)),
        *((BF16, F32, False), (F32, BF16, False)),
    ),
)
def test_copy(
    apart: torch.dtype, flat: torch.dtype, into_flat: bool, arch: int, tmp_path: Path
) -> None:
    arguments = {"chunks": "*i64", "flat": f"*{SHORT[flat]}", "scale": "fp64"}
    constants = {"APART": apart, "WIDE": wide_dtype(apart, flat), "INTO_FLAT": into_flat}
    block = CHUNK // min(apart.itemsize, flat.itemsize)
    code = compiled(copy_kernel, arch, tmp_path, arguments, constants | {"BLOCK": block})
    source, target = (apart, flat) if into_flat else (flat, apart)
    # Chunks whose length is a multiple of 16 use 16-byte accesses of 128 threads; all other
    # accesses are for tails and padding.
    per_thread = block // 128
    assert count_128(code, "LDG") == per_thread * source.itemsize // 16
    assert count_128(code, "STG") == per_thread * target.itemsize // 16
    # Those store adjacent elements from adjacent threads.
    narrow = re.findall(r"STG\.E(?!\.128)\S* .*?\[R\d+\.64(?:\+(0x\w+))?\]", code.sass)
    assert len(narrow) == 2 * per_thread
    assert all(int(at or "0", 16) % (128 * target.itemsize) == 0 for at in narrow)
    assert not spills(code)
    assert code.registers <= 40 or F64 in (apart, flat)  # so twelve programs fit a multiprocessor
    assert ".ftz" not in code.ptx


@pytest.mark.parametrize(("arch", "source"), each_arch_and_row((F32,), (BF16,)))
def test_squared_norm(source: torch.dtype, arch: int, tmp_path: Path) -> None:
    arguments = {"chunks": "*i64", "count": "i32", "scratch": "*fp64", "total": "*fp64"}
    constants = {"SOURCE": source, "BLOCK": NORM_BLOCK, "MOST": 1024}
    constants["LANES"] = THREADS * 16 // source.itemsize
    code = compiled(squared_norm_kernel, arch, tmp_path, arguments, constants, odd=("count",))
    assert count_128(code, "LDG") == NORM_BLOCK // THREADS * source.itemsize // 16
    assert not spills(code)
    # registers are allocated in eights, from a multiprocessor's 65536
    resident = 65536 // (-(-code.registers // 8) * 8 * THREADS)
    # the comment on PROGRAMS says which ones are not all resident at once
    late = arch == 80 or (triton.__version__ >= "3.9" and arch == 90 and source == BF16)
    assert resident >= PROGRAMS // 132 - late
    # Threads' sums are combined once, and the programs' at two places: no shuffles in the loop over
    # chunks. Up to 8 more count the missing ones [3 or 8 in Triton 3.6 and 3.7].
    assert 0 <= len(re.findall(r"\bshfl\.sync", code.ptx)) - 3 * 2 * (5 + 3) <= 8
    assert ".ftz" not in code.ptx
    # A program's result and its flag are one 64-bit message, so no fence is needed.
    assert re.findall(r"\batom\.\S+", code.ptx) == ["atom.global.gpu.relaxed.exch.b64"]
    assert code.ptx.count("ld.volatile.global") >= 2  # in both waits
    assert not re.search(r"\b(?:membar|fence)\b", code.ptx)


@pytest.mark.parametrize(
    ("arch", "source", "target"), each_arch_and_row((F32, F32), (BF16, F32), (BF16, BF16))
)
def test_unscale(
    source: torch.dtype,
    target: torch.dtype,
    arch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = {
        "x": f"*{SHORT[source]}",
        "out": f"*{SHORT[target]}",
        "found": "*fp32",
        "elems": "i32",
        "scale": "fp64",
    }
    constants: dict[str, Any] = {}
    monkeypatch.setattr(unscale_kernel, "launch", lambda *_, **given: constants.update(given))
    x, out = (torch.zeros(16, dtype=dtype) for dtype in (source, target))
    unscale_triton(x, out, torch.zeros(1), 1.0)
    code = compiled(unscale_kernel, arch, tmp_path, arguments, constants)
    assert width(code, "LDG") == {128}
    assert width(code, "STG") == {32, 128}  # 32: the flag
    assert code.accesses["STG.E"] == count_128(code, "LDG")  # it is set once for what is read
    assert not spills(code)
    assert ".ftz" not in code.ptx
    # Threads do not wait for one another, unless `out` is distributed to them differently from `x`.
    assert not re.findall(r"\b(?:bar|shfl)\.sync", code.ptx) or source.itemsize != target.itemsize


@pytest.mark.parametrize("arch", ARCHES)
def test_stochastic_round(arch: int, tmp_path: Path) -> None:
    arguments = {"x": "*fp32", "out": "*bf16", "elems": "i32"}
    arguments |= dict.fromkeys(stochastic_round_kernel.unspecialized, "u32")
    constants = {"FIRST": FIRST, "SECOND": SECOND, "NAN": NAN, "BLOCK": STOCHASTIC_BLOCK}
    code = compiled(stochastic_round_kernel, arch, tmp_path, arguments, constants)
    assert width(code, "LDG") == {128}
    assert width(code, "STG") <= {64, 128}
    assert not spills(code)


@pytest.mark.parametrize("arch", ARCHES)
def test_odd_lengths_would_lose_wide_accesses(arch: int, tmp_path: Path) -> None:
    """See Note [16-byte accesses], why launchers split such lengths. Shows that the checks can
    fail."""
    arguments = dict.fromkeys(("parts", "own", "out"), "*fp32")
    arguments |= {"elems": "i32", "stride": "i32", "one": "fp32"}
    constants = {"RANKS": 2, "AT": 2, "WIDE": F32, "BLOCK": FOLD_BLOCK}
    code = compiled(fold_kernel, arch, tmp_path, arguments, constants, odd=("elems",))
    assert width(code, "LDG") == {32}
