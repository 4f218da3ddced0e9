"""Triton's own dispatch with a stub compiler and driver, which records compilations and
launches."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ringdp.kernels import jit
from ringdp.kernels.jit import Kernel

STREAM = 5


class Compiled:
    """Stands in for a CompiledKernel: what JITFunction.run and ringdp use of it."""

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
    """Stands in for Triton's driver."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM


class Dispatch:
    """Records `requested`, the number of calls of JITFunction.run, `compiled`, the keys of the
    variants to be compiled, and `launched`, a (grid, *arguments) per launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        self.requested, self.compiled = 0, list[Any]()
        self.launched: list[tuple[Any, ...]] = []
        self.monkeypatch = monkeypatch
        run = JITFunction.run

        def requested(function: Any, *args: Any, **options: Any) -> Any:
            self.requested += 1
            return run(function, *args, **options)

        def compiled(function: Any, key: Any, signature: Any, device: int, *_: Any) -> Compiled:
            self.compiled.append(key)
            function.device_caches[device][0][key] = kernel_stub = Compiled(self.launched)
            return kernel_stub

        monkeypatch.setattr(driver, "_active", Driver())
        monkeypatch.setattr(jit, "raw_stream", lambda device: STREAM)
        monkeypatch.setattr(JITFunction, "run", requested)
        monkeypatch.setattr(JITFunction, "_do_compile", compiled)

    def replace_kernel(self, kernel: Kernel, module: str) -> Kernel:
        """Replaces `module`'s kernel by a copy of `kernel` that has no variants yet."""
        fresh = Kernel(kernel.fn, kernel.unspecialized, kernel.options, capturable=True)
        self.monkeypatch.setattr(sys.modules[module], kernel.fn.__name__, fresh)
        return fresh
