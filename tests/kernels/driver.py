"""Stands in for the functions of the CUDA driver that launch kernels: csrc/launches.hpp."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_uint, c_void_p, cast, string_at
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

import pytest

import ringdp.kernels
from ringdp._core import Driver
from ringdp.kernels.repeats import Repeats

OUT, NUMBERS = POINTER(c_void_p), [c_uint] * 7
KINDS = (
    CFUNCTYPE(c_int, OUT),
    CFUNCTYPE(c_int, c_void_p, POINTER(c_int)),
    CFUNCTYPE(c_int, c_void_p, *NUMBERS, c_void_p, OUT, c_void_p),
    CFUNCTYPE(c_int, c_int, POINTER(c_char_p)),
)


class Given(NamedTuple):
    """What a launch was given."""

    function: int
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int
    stream: int | None
    arguments: Any  # their addresses

    def bits(self, widths: list[int]) -> list[int]:
        """The arguments of so many bits."""
        return [
            int.from_bytes(string_at(self.arguments[i], width // 8), "little")
            for i, width in enumerate(widths)
        ]


class StandIn:
    """Calls `act` with every launch. What that raises becomes the driver's error."""

    def __init__(self, act: Callable[[Given], object]) -> None:
        self.context: int | None = 1
        self.capturing = 0
        self._act, self._error = act, b""
        functions = self._get_context, self._get_capturing, self._launch, self._get_text
        self._kept = [kind(f) for kind, f in zip(KINDS, functions, strict=True)]
        self.driver = Driver([cast(f, c_void_p).value for f in self._kept])

    def _get_context(self, out: Any) -> int:
        out[0] = self.context
        return 0

    def _get_capturing(self, stream: int | None, out: Any) -> int:
        out[0] = self.capturing
        return 0

    def _launch(self, function: int, *given: Any) -> int:
        x, y, z, *threads, shared, stream, arguments, extra = given
        try:
            assert extra is None
            self._act(Given(function, (x, y, z), tuple(threads), shared, stream, arguments))
        except Exception as e:
            self._error = f"{type(e).__name__}: {e}".encode()
            return 1
        return 0

    def _get_text(self, error: int, out: Any) -> int:
        out[0] = self._error
        return 0


def forget_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empties all kernels' caches, whose launches need the driver that made them."""
    for found in iter_modules(ringdp.kernels.__path__, "ringdp.kernels."):
        module = import_module(found.name)
        if hasattr(module, "_repeats"):
            monkeypatch.setattr(module, "_repeats", Repeats())
