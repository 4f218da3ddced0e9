"""Runs the Triton kernels on CPU tensors: in Triton's interpreter, or as compiled code."""

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
# Triton's name of a dtype -> torch's dtype
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Replaces the interpreter's conversion, which truncates float32 to bfloat16 and mishandles
    subnormals, by one that rounds as hardware does."""
    bits = torch.from_numpy(data.copy().reshape(-1).view(f"int{source.primitive_bitwidth}"))
    width = target.primitive_bitwidth
    rounded = bits.view(DTYPES[str(source)]).to(DTYPES[str(target)])
    return (
        rounded.view(getattr(torch, f"int{width}")).numpy().view(f"uint{width}").reshape(data.shape)
    )


def patch_tensor(patch: Callable[..., None], tensor: Any, scope: Any) -> None:
    """Also gives the tensor an __index__ that works with numpy 2.5: Triton 3.6's returns an
    array."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda x: x.handle.data.item())


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `*_triton` launchers take CPU tensors, for one test, without an environment variable."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    patched = partial(patch_tensor, interpreter._patch_lang_tensor)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    language = pytest.importorskip("triton.language")
    add = language.standard._sum_combine
    # tl.sum was compiled for devices when triton was imported; this one runs in the interpreter.
    monkeypatch.setattr(language, "sum", lambda x, axis: language.reduce(x, axis, add))
    for kernel in KERNELS:
        assert kernel.function is not None  # its first use makes `tl` visible to the kernel
        monkeypatch.setitem(vars(kernel), "function", interpreter.InterpretedFunction(kernel.fn))


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `*_triton` launchers take CPU tensors and run the code that Triton compiles."""
    pytest.importorskip("triton")
    execute(monkeypatch, KERNELS)


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Dispatch:
    pytest.importorskip("triton")
    return Dispatch(monkeypatch)
