"""Triton's own dispatch and compiler for sm_90; the compiled PTX is run on the host by `ptx`."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from ringdp.kernels.jit import Kernel
from tests.kernels.dispatch import Driver
from tests.kernels.ptx import Code, launch


class Executed:
    """Stands in for a CompiledKernel: what JITFunction.run and ringdp use of it."""

    function, packed_metadata = 0, ()

    def __init__(self, made: Any, signature: dict[str, str]) -> None:
        self._code, self._shared = Code(made.asm["ptx"]), made.metadata.shared
        self._types = list(signature.values())

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, programs: int, y: int, z: int, *rest: Any) -> None:
        assert (y, z) == (1, 1)
        _stream, _function, _packed, _metadata, _enter, _exit, *arguments = rest
        pairs = zip(self._types, arguments, strict=True)
        bits = [_bits(kind, x) for kind, x in pairs if kind != "constexpr"]
        launch(self._code, programs, bits, self._shared)


def _bits(kind: str, x: Any) -> int:
    """An argument's bits, as a launcher passes them."""
    if kind in ("fp32", "fp64"):
        return int.from_bytes(struct.pack({"fp32": "<f", "fp64": "<d"}[kind], x), "little")
    return int(x if isinstance(x, int) else x.data_ptr())


def execute(monkeypatch: pytest.MonkeyPatch, kernels: list[Kernel]) -> None:
    """Lets the launchers of these kernels take CPU tensors and run compiled code."""
    import triton
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def compiled(
        function: Any,
        key: Any,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attrs: Any,
        *_: Any,
    ) -> Executed:
        source = function.ASTSource(function, signature, constants, attrs)
        made = triton.compile(source, target=Driver().get_current_target(), options=vars(options))
        function.device_caches[device][0][key] = executed = Executed(made, signature)
        return executed

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    for kernel in kernels:
        fresh = Kernel(kernel.fn, kernel.unspecialized, kernel.options, capturable=True)
        for name in ("function", "_variants"):
            monkeypatch.setitem(vars(kernel), name, getattr(fresh, name))
