"""DDP's mixed precision: a parameter is cast to param_dtype from the forward until its gradient.

    forward begins      p.data = p.data.to(param_dtype); p.grad is cast too, if there is one
    gradient is made    p.data is the full-precision tensor again; the gradient goes into its bucket
    bucket is complete  cast to reduce_dtype, summed, divided by n, cast to the dtype of p

The order and the bits are those of torch's DDP, so gradients accumulate in param_dtype. Two things
differ: a forward under no_grad restores the parameters afterwards, and only floating-point buffers
are cast. As in torch, p._fp_param is the full-precision tensor and p._mp_param the low-precision
one. `shard(precision=...)` offers more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ringdp.errors import UsageError
from ringdp.parallel.ddp.comm_hooks import BuiltIn
from ringdp.parallel.values.inputs import cast, give_back, moved

FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


class MixedPrecision:
    """Casts the parameters of one model, except those whose names are `ignored`."""

    def __init__(self, model: nn.Module, ignored: Set[str], config: Any) -> None:
        """`config`: torch's `_MixedPrecision`, or None. Casts the buffers, once."""
        self.model, self.ignored = model, ignored
        self.dtype, reduce, buffer = dtypes(config)
        self.hook = None if config is None else BuiltIn("mixed precision", reduce, divides_sum=True)
        self._full: dict[nn.Parameter, Tensor] = {}  # full-precision p.data of those cast down
        for p in self._parameters():
            _show(p, p.data, p.new_empty(0, dtype=self.dtype))
        for name, tensor in model.named_buffers():
            if buffer is not None and tensor.is_floating_point() and name not in ignored:
                tensor.data = tensor.to(buffer)

    def cast_down(self) -> list[nn.Parameter]:
        """Cast all parameters to param_dtype. Returns those that were not yet."""
        lowered = [p for p in self._parameters() if p.dtype != self.dtype]
        for p in lowered:
            self._full[p], p.data = p.data, p.data.to(self.dtype)
            _show(p, self._full[p], p.data)
            _cast_gradient(p)
        return lowered

    def _parameters(self) -> list[nn.Parameter]:
        """The parameters that are cast."""
        named = self.model.named_parameters() if self.dtype else ()
        return [p for name, p in named if name not in self.ignored and p.is_floating_point()]

    def restore(self, p: nn.Parameter) -> None:
        """Undo `cast_down` for one parameter, if it was cast."""
        if (full := self._full.pop(p, None)) is not None:
            p.data = full
            _show(p, full, full.new_empty(0, dtype=self.dtype))
            _cast_gradient(p)

    def restore_all(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        for p in list(self._full) if parameters is None else parameters:
            self.restore(p)

    @contextmanager
    def inputs(self, args: Any, kwargs: Any, device: torch.device | None) -> Iterator[Any]:
        """The module's inputs, cast to param_dtype and moved to `device`. See `values.inputs`."""
        given: Any = args, kwargs
        there = given if device is None else moved(given, device)
        passed = cast(there, self.dtype) if self.dtype else there
        back = give_back(given, passed)
        try:
            yield passed
        finally:
            back()


def _show(p: nn.Parameter, full: Tensor, low: Tensor) -> None:
    p._fp_param, p._mp_param = full, low  # type: ignore[attr-defined]


def _cast_gradient(p: nn.Parameter) -> None:
    if p.grad is not None and p.grad.dtype != p.dtype:
        p.grad.data = p.grad.to(p.dtype)


def dtypes(config: Any) -> tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]:
    """torch's `_MixedPrecision` as (param, reduce, buffer) dtypes. Raises UsageError for others."""
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
