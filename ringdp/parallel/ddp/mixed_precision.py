"""Mixed precision inside DDP: parameters are low from a forward on, until their gradient is there.

    forward begins     p.data = p.data.to(param_dtype), and so p.grad, if there is one
    a gradient exists  p.data is what it was; the gradient goes into its bucket, not divided
    a bucket is whole  cast to reduce_dtype, summed, divided by n, cast to what p is at rest

As torch's DDP does it, in that order, and to the same bits; so what p.grad holds is added to in
param_dtype. Unlike there a forward without gradients leaves parameters as they were, and of
buffers only floating ones are cast. To be read, as there: p._fp_param is p.data at rest,
p._mp_param the low one. `Precision`, of `shard`, is the richer way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ringdp.errors import UsageError
from ringdp.parallel.ddp.builtin_hooks import BuiltIn
from ringdp.parallel.precision import cast
from ringdp.parallel.values.devices import moved
from ringdp.parallel.values.inputs import give_back

FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


class Mixed:
    """The parameters of one model, but for those whose names are `ignored`: at rest or low."""

    def __init__(self, model: nn.Module, ignored: Set[str], config: Any) -> None:
        """`config`: torch's `_MixedPrecision`, or None. Casts buffers. Raises UsageError."""
        self.model, self.ignored = model, ignored
        self.dtype, reduce, buffer = dtypes(config)
        self.hook = None if config is None else BuiltIn("mixed precision", reduce, divides_sum=True)
        self._rest: dict[nn.Parameter, Tensor] = {}  # p.data at rest, of those that are low
        for p in self._parameters():
            _show(p, p.data, p.new_empty(0, dtype=self.dtype))
        for name, tensor in model.named_buffers():
            if buffer is not None and tensor.is_floating_point() and name not in ignored:
                tensor.data = tensor.to(buffer)
        sparse = [n for n, m in model.named_modules() if getattr(m, "sparse", False)]
        if config is not None and sparse:
            raise UsageError(f"{sparse[0]} makes sparse gradients: no mixed_precision with them")

    def lower(self) -> list[nn.Parameter]:
        """All of them; returned are those that were at rest."""
        lowered = [p for p in self._parameters() if p.dtype != self.dtype]
        for p in lowered:
            self._rest[p], p.data = p.data, p.data.to(self.dtype)
            _show(p, self._rest[p], p.data)
            _cast_gradient(p)
        return lowered

    def _parameters(self) -> list[nn.Parameter]:
        """Those that become low."""
        return [
            p
            for name, p in self.model.named_parameters()
            if self.dtype and name not in self.ignored and p.is_floating_point()
        ]

    def raise_(self, p: nn.Parameter) -> None:
        """What it is at rest, if it was low."""
        if (rest := self._rest.pop(p, None)) is not None:
            p.data = rest
            _show(p, rest, rest.new_empty(0, dtype=self.dtype))
            _cast_gradient(p)

    def raise_all(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        for p in list(self._rest) if parameters is None else parameters:
            self.raise_(p)

    @contextmanager
    def inputs(self, args: Any, kwargs: Any, device: torch.device | None) -> Iterator[Any]:
        """What the module gets, on that device if there is one. See `values.inputs`."""
        given: Any = args, kwargs
        there = given if device is None else moved(given, device)
        passed = cast(there, self.dtype) if self.dtype else there
        back = give_back(given, passed)
        try:
            yield passed
        finally:
            back()


def _show(p: nn.Parameter, rest: Tensor, low: Tensor) -> None:
    p._fp_param, p._mp_param = rest, low  # type: ignore[attr-defined]


def _cast_gradient(p: nn.Parameter) -> None:
    if p.grad is not None and p.grad.dtype != p.dtype:
        p.grad.data = p.grad.to(p.dtype)


def dtypes(config: Any) -> tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]:
    """Of parameters, reductions and buffers: what torch's `_MixedPrecision` says, if it is one."""
    if config is None:
        return None, None, None
    found: list[Any] = [getattr(config, field, "missing") for field in FIELDS]
    param, reduce, buffer = found
    if not all(d is None or (isinstance(d, torch.dtype) and d.is_floating_point) for d in found):
        raise UsageError(
            f"mixed_precision is {config!r}; allowed: an object with a floating dtype, or None, as "
            f"{', '.join(FIELDS)}, such as torch.nn.parallel.distributed._MixedPrecision"
        )
    return param, reduce or param, buffer
