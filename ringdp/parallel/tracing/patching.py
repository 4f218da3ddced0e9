"""Wraps methods of living objects for as long as a trace runs: they know nothing of traces, but who
watches them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Any

from ringdp.tape.recorder import Recorder

Method = Callable[..., Any]


class Patches:
    """What is wrapped, until `off`."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[object, str]] = []

    def before(self, of: object, name: str, told: Callable[..., object]) -> None:
        """Call `told` with the arguments of each call, before it."""

        def call(method: Method, *args: Any, **named: Any) -> Any:
            told(*args)
            return method(*args, **named)

        self.put(of, name, call)

    def after(self, of: object, name: str, told: Callable[..., object]) -> None:
        """The same once it has returned."""

        def call(method: Method, *args: Any, **named: Any) -> Any:
            result = method(*args, **named)
            told(*args)
            return result

        self.put(of, name, call)

    def timed(self, of: object, name: str, told: Callable[..., object]) -> None:
        """Call `told` with when it began (ns) and the arguments, once it has ended or raised."""

        def call(method: Method, *args: Any, **named: Any) -> Any:
            since = monotonic_ns()
            try:
                return method(*args, **named)
            finally:
                told(since, *args)

        self.put(of, name, call)

    def off(self) -> None:
        for of, name in reversed(self._wrapped):
            delattr(of, name)
        self._wrapped.clear()

    def put(self, of: object, name: str, call: Callable[..., Any]) -> None:
        """Calls of the method are `call(method, ...)`, until `off`."""
        assert name not in vars(of), f"{name} is wrapped already"
        setattr(of, name, partial(call, getattr(of, name)))
        self._wrapped.append((of, name))


class Watched:
    """What a trace asks, a `tape.recorder.Source`. While one runs there is a `watcher` around it,
    made of it and the recorder, until its `end`."""

    watcher: type[Any]
    _watching: Any

    def tape_on(self, recorder: Recorder) -> None:
        self._watching = self.watcher(self, recorder)

    def tape_drain(self) -> None:
        """Nothing: the recorder has it all."""

    def tape_off(self) -> None:
        self._watching.end()
        del self._watching
