"""The kernels in Triton's interpreter, rounding as the hardware does, for one test at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch

import ringdp.kernels
from ringdp.kernels.jit import Kernel
from tests.kernels.dispatch import Dispatch
from tests.kernels.executed import execute

KERNELS = [
    found
    for module in iter_modules(ringdp.kernels.__path__, "ringdp.kernels.")
    for found in vars(import_module(module.name)).values()
    if isinstance(found, Kernel)
]
# Triton's name of a dtype: torch's
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Replaces the interpreter's: it truncates float32 to bfloat16 and mishandles subnormals."""
    bits = torch.from_numpy(data.copy().reshape(-1).view(f"int{source.primitive_bitwidth}"))
    width = target.primitive_bitwidth
    rounded = bits.view(DTYPES[str(source)]).to(DTYPES[str(target)])
    return (
        rounded.view(getattr(torch, f"int{width}")).numpy().view(f"uint{width}").reshape(data.shape)
    )


def patch_tensor(patch: Callable[..., None], tensor: Any, scope: Any) -> None:
    """And what numpy 2.5 accepts as an index: Triton 3.6 makes one of an array of one element."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda x: x.handle.data.item())


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`*_triton` launchers take CPU tensors here; no environment variable is set, nothing leaks."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    patched = partial(patch_tensor, interpreter._patch_lang_tensor)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    language = pytest.importorskip("triton.language")
    add = language.standard._sum_combine
    # tl.sum itself was compiled for devices, when triton was imported; the interpreter does this.
    monkeypatch.setattr(language, "sum", lambda x, axis: language.reduce(x, axis, add))
    for kernel in KERNELS:
        assert kernel.function is not None  # the first use puts `tl` where the kernel finds it
        monkeypatch.setitem(vars(kernel), "function", interpreter.InterpretedFunction(kernel.fn))


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`*_triton` launchers take CPU tensors here, and run what Triton compiles of the kernels."""
    pytest.importorskip("triton")
    execute(monkeypatch, KERNELS)


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Dispatch:
    pytest.importorskip("triton")
    return Dispatch(monkeypatch)
