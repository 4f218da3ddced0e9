"""`triton.jit` put off to the first launch: a kernel can stand beside its torch reference.

A decorated function is plain Python until it is launched, so a machine without Triton can import
its module. Leaves out: helpers. A kernel may call `tl` only, not another decorated function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch


class jit:  # noqa: N801  a decorator
    """`kernel[grid](*args)` launches; `kernel.function` is Triton's own object, for compilers."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn
        self.__doc__ = fn.__doc__

    @cached_property
    def function(self) -> Any:
        """A JITFunction, or an InterpretedFunction where TRITON_INTERPRET=1 at the first use."""
        import triton
        import triton.language as tl

        self.fn.__globals__["tl"] = tl
        return triton.jit(self.fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.function[grid]


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a torch dtype, to be passed as a `tl.constexpr`."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def sixteens(elems: int) -> Iterator[tuple[int, int]]:
    """Note [16-byte accesses]

    A masked access stays 16 bytes wide only if Triton knows that the mask changes at multiples of
    16 elements, which it does if the length is one. Any other length is two launches, of the
    elements [first, last) of each: the part that is, and fewer than 16 elements. Flat buffers are
    padded, so the second is rare.
    """
    body = elems - elems % 16
    for first, last in ((0, body), (body, elems)):
        if first < last:
            yield first, last
