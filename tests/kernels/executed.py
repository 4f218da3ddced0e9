"""Triton's own dispatch and compiler for sm_90; the compiled PTX is run on the host by `ptx`."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from ringdp.kernels.jit import Kernel
from tests.kernels.dispatch import Driver
from tests.kernels.driver import Given, StandIn, forget_calls
from tests.kernels.ptx import Code, launch


class Executed:
    """Stands in for a CompiledKernel: what JITFunction.run and ringdp use of it."""

    packed_metadata = ()

    def __init__(self, made: Any, signature: dict[str, str]) -> None:
        self.metadata, self.src, self.asm = made.metadata, made.src, made.asm
        self.function = id(self)
        self._code = Code(made.asm["ptx"])
        self._types = list(signature.values())

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, programs: int, y: int, z: int, *rest: Any) -> None:
        assert (y, z) == (1, 1)
        _stream, _function, _packed, _metadata, _enter, _exit, *arguments = rest
        pairs = zip(self._types, arguments, strict=True)
        bits = [_bits(kind, x) for kind, x in pairs if kind != "constexpr"]
        launch(self._code, programs, bits, self.metadata.shared)

    def launched(self, given: Given) -> None:
        """By the driver."""
        assert given.grid[1:] == given.threads[1:] == (1, 1)
        assert given.threads[0] == self._code.threads
        assert given.shared == self.metadata.shared
        bits = given.bits([int(x) for x in re.findall(r"\.param \.\w(\d+)", self.asm["ptx"])])
        count = len(self._types) - self._types.count("constexpr")
        assert not any(bits[count:]), "pointers to scratch memory"
        launch(self._code, given.grid[0], bits[:count], given.shared)


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

    made_all = dict[int, Executed]()
    stand_in = StandIn(lambda given: made_all[given.function].launched(given))

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
        made_all[executed.function] = executed
        return executed

    forget_calls(monkeypatch)
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr("ringdp.kernels.compiled.driver", lambda: stand_in.driver)
    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    for kernel in kernels:
        fresh = Kernel(kernel.fn, kernel.unspecialized, kernel.options, capturable=True)
        for name in ("function", "_variants"):
            monkeypatch.setitem(vars(kernel), name, getattr(fresh, name))
