"""The address of a tensor, for C++ and GPUs, which cannot check that its memory exists."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor


def address(x: Tensor) -> int:
    """Return the address of a tensor. Raises ValueError if its elements are not all in memory, or
    if they are lazily negated, as the imaginary part of a conjugate is."""
    check_storage(x)
    if x.is_neg():
        raise ValueError(f"{x.dtype}{list(x.shape)} is lazily negated; pass its resolve_neg()")
    at = x.data_ptr()
    if x.numel() and not at:
        raise _missing(x)
    return at


def check_storage(*tensors: Tensor) -> None:
    """Raise ValueError if a storage ends before its tensor does: torch would read on, too."""
    for x in tensors:
        with suppress(RuntimeError):  # it has none, for instance in torch.func.vmap
            steps = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            end = (x.storage_offset() + steps + 1) * x.element_size()
            if x.numel() and x.untyped_storage().nbytes() < end:
                raise _missing(x)


def _missing(x: Tensor) -> ValueError:
    at, has = x.data_ptr(), x.untyped_storage().nbytes()
    return ValueError(
        f"{x.dtype}{list(x.shape)} at element {x.storage_offset()} of a storage of {has} bytes "
        f"is not in memory (address {at:#x}): that was freed or cut, or the tensor is fake"
    )
