"""Methods whose second calls stay in C++, since small messages take a microsecond.

A call like one before (op, tag, dtype and length the same, its tensors flat buffers) is found,
numbered, told the user's line and run (with async_op: begun) by csrc/ready.hpp. Every other one
goes to the method, so that Python alone says what it means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ringdp._core import Repeated
from ringdp.transport.base import DIRECT, Direct

F = TypeVar("F", bound=Callable[..., object])


def repeated(collective: Direct) -> Callable[[F], F]:
    """For a method of Communicator: that collective's."""

    def decorated(method: F) -> F:
        if not hasattr(Tensor, "__dlpack_c_exchange_api__"):  # see csrc/tensors.hpp
            return method
        made: F = Repeated(DIRECT.index(collective), method)  # type: ignore[assignment]
        return made

    return decorated
