"""Triton's own dispatch with a stub compiler and driver, which records compilations and
launches."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ringdp.kernels import jit
from ringdp.kernels.compiled import PLAIN
from ringdp.kernels.jit import Kernel
from tests.kernels.driver import Given, StandIn, forget_calls

STREAM = 5


class Compiled:
    """Stands in for a CompiledKernel: what JITFunction.run and ringdp use of it. Its code takes two
    pointers more than its arguments, as Triton's does."""

    packed_metadata = 4, 1, 0
    metadata = SimpleNamespace(shared=0, **PLAIN)

    def __init__(self, launched: list[tuple[Any, ...]], signature: dict[str, str]) -> None:
        self.launched, self.function = launched, id(self)
        self.src = SimpleNamespace(signature=signature)
        self._kinds = [kind for kind in signature.values() if kind != "constexpr"]
        self._widths = [int(f"0{kind}"[-2:]) if kind[0] != "*" else 64 for kind in self._kinds]
        parameters = ", ".join(f".param .b{bits} x" for bits in (*self._widths, 64, 64))
        self.asm = {"ptx": f".visible .entry f({parameters})\n.reqntid 128\n{{}}"}

    def launch_metadata(self, *_: Any) -> None: ...

    def run(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any
    ) -> None:
        assert (stream, function, packed) == (STREAM, self.function, self.packed_metadata)
        _metadata, _enter, _exit, *args = rest
        self.launched.append(((x, y, z), *args))

    def launch(self, given: Given) -> None:
        """By the driver, which gets no constants."""
        bits = given.bits(self._widths)
        pairs = zip(self._kinds, bits, strict=True)
        self.launched.append((given.grid, *(number(kind, x) for kind, x in pairs)))


def number(kind: str, bits: int) -> float:
    """An argument of this type."""
    if kind in ("fp32", "fp64"):
        form, size = {"fp32": ("<f", 4), "fp64": ("<d", 8)}[kind]
        return float(struct.unpack(form, bits.to_bytes(size, "little"))[0])
    return bits


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
    variants to be compiled, and `launched`, a (grid, *arguments) per launch: with the constants if
    it was Triton's; `streams`, those of the driver's launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        self.requested, self.compiled = 0, list[Any]()
        self.launched: list[tuple[Any, ...]] = []
        self.streams = list[int | None]()
        self.monkeypatch = monkeypatch
        run, made_all = JITFunction.run, dict[int, Compiled]()

        def launch(given: Given) -> None:
            self.streams.append(given.stream)
            made_all[given.function].launch(given)

        self.driver = StandIn(launch)

        def requested(function: Any, *args: Any, **options: Any) -> Any:
            self.requested += 1
            return run(function, *args, **options)

        def compiled(function: Any, key: Any, signature: Any, device: int, *_: Any) -> Compiled:
            self.compiled.append(key)
            function.device_caches[device][0][key] = made = Compiled(self.launched, signature)
            made_all[made.function] = made
            return made

        forget_calls(monkeypatch)
        monkeypatch.setattr(driver, "_active", Driver())
        monkeypatch.setattr(jit, "raw_stream", lambda device: STREAM)
        monkeypatch.setattr("ringdp.kernels.compiled.driver", lambda: self.driver.driver)
        monkeypatch.setattr(JITFunction, "run", requested)
        monkeypatch.setattr(JITFunction, "_do_compile", compiled)

    def replace_kernel(self, kernel: Kernel, module: str) -> Kernel:
        """Replaces `module`'s kernel by a copy of `kernel` that has no variants yet."""
        fresh = Kernel(kernel.fn, kernel.unspecialized, kernel.options, capturable=True)
        self.monkeypatch.setattr(sys.modules[module], kernel.fn.__name__, fresh)
        return fresh
