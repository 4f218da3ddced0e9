"""Wraps methods of live objects while a trace runs, so that the objects need no tracing code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Any

Method = Callable[..., Any]


class Patches:
    """Wrapped methods, until `off`."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[object, str]] = []

    def before(self, of: object, name: str, told: Callable[..., object]) -> None:
        """Call `told(*args)` before each call of the method."""

        def call(method: Method, *args: Any, **named: Any) -> Any:
            told(*args)
            return method(*args, **named)

        self._put(of, name, call)

    def after(self, of: object, name: str, told: Callable[..., object]) -> None:
        """Call `told(*args)` after each call that returned."""

        def call(method: Method, *args: Any, **named: Any) -> Any:
            result = method(*args, **named)
            told(*args)
            return result

        self._put(of, name, call)

    def timed(self, of: object, name: str, told: Callable[..., object]) -> None:
        """Call `told(start_ns, *args)` after each call, whether it returned or raised."""

        def call(method: Method, *args: Any, **named: Any) -> Any:
            since = monotonic_ns()
            try:
                return method(*args, **named)
            finally:
                told(since, *args)

        self._put(of, name, call)

    def off(self) -> None:
        for of, name in reversed(self._wrapped):
            delattr(of, name)
        self._wrapped.clear()

    def _put(self, of: object, name: str, call: Callable[..., Any]) -> None:
        """Replace the method by `call(method, ...)`."""
        assert name not in vars(of), f"{name} is wrapped already"
        setattr(of, name, partial(call, getattr(of, name)))
        self._wrapped.append((of, name))
