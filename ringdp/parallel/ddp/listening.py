"""What autograd calls for a reducer: hooks that do not keep it alive, and what ends a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Listens(Protocol):
    def made(self, index: int) -> None:
        """A part of that parameter's gradient has been added to p.grad."""

    def end_later(self) -> None:
        """A backward has come to what forward returned."""


def listener(ref: weakref.ref[Listens], index: int) -> Callable[..., None]:
    """A hook that does not keep the reducer alive."""

    def made(*_: object) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.made(index)

    return made


def raiser(error: Exception) -> Callable[[], None]:
    """Of a reduction that could not begin. It is told at backward's end, as of one that fails
    later: where this backward is about to raise an error of the user's own, as it did on a rank
    that has left for it, that error is heard."""

    def end() -> None:
        raise error

    return end


def ender(ref: weakref.ref[Listens]) -> Callable[[Tensor], None]:
    def end(_: Tensor) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.end_later()

    return end
