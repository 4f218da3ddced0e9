"""Tensors that the user has assigned to the `.data` of a parameter between its uses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ringdp.errors import UsageError


def homes(tensors: Sequence[Tensor]) -> list[int]:
    """The addresses of their memory. A slice without elements has one, too: every rank must see an
    assignment to `.data`, wherever the elements are."""
    return [t.data_ptr() or t.untyped_storage().data_ptr() for t in tensors]


def check(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor], names: list[str]) -> None:
    """Raise UsageError if a parameter has another shape or dtype than its tensor."""
    for p, tensor, name in zip(parameters, tensors, names, strict=True):
        if p.shape != tensor.shape or p.dtype != tensor.dtype:
            raise UsageError(
                f"parameter {name} has become {p.dtype}{list(p.shape)}, by `.data` or "
                f"`.to()`; in the sharded model it is {tensor.dtype}{list(tensor.shape)}. "
                "Change the model before shard(), or values in place"
            )
