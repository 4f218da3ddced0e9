"""Triton's own dispatch, but for the compiler and the device: what it is asked, and launches."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ringdp.kernels import jit
from ringdp.kernels.jit import Kernel

STREAM = 5


class Compiled:
    """In place of a CompiledKernel, with what JITFunction.run and we call of it."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self.launched = launched

    def launch_metadata(self, *_: Any) -> None: ...

    def run(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any
    ) -> None:
        assert (stream, function, packed) == (STREAM, self.function, self.packed_metadata)
        _metadata, _enter, _exit, *args = rest
        self.launched.append(((x, y, z), *args))


class Driver:
    """In place of Triton's."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM


class Dispatch:
    """`asked`: how often Triton was asked for a variant; `compiled`: the keys of those it wanted;
    `launched`: (grid, *arguments)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        self.asked, self.compiled = 0, list[Any]()
        self.launched: list[tuple[Any, ...]] = []
        self.monkeypatch = monkeypatch
        run = JITFunction.run

        def asked(function: Any, *args: Any, **options: Any) -> Any:
            self.asked += 1
            return run(function, *args, **options)

        def compiled(function: Any, key: Any, signature: Any, device: int, *_: Any) -> Compiled:
            self.compiled.append(key)
            function.device_caches[device][0][key] = made = Compiled(self.launched)
            return made

        monkeypatch.setattr(driver, "_active", Driver())
        monkeypatch.setattr(jit, "raw_stream", lambda device: STREAM)
        monkeypatch.setattr(JITFunction, "run", asked)
        monkeypatch.setattr(JITFunction, "_do_compile", compiled)

    def over(self, kernel: Kernel, module: str) -> Kernel:
        """`module` launches a kernel like this one, which has no variants yet."""
        fresh = Kernel(kernel.fn, kernel.unspecialized, kernel.options, capturable=True)
        self.monkeypatch.setattr(sys.modules[module], kernel.fn.__name__, fresh)
        return fresh
