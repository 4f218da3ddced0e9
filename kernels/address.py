"""The address of a tensor, for C++ and GPUs, which cannot check that its memory exists."""

from __future__ import annotations

from torch import Tensor


def address(x: Tensor) -> int:
    """Return the address of a contiguous tensor. Raises ValueError if it is not all in memory."""
    at, has = x.data_ptr(), x.untyped_storage().nbytes()
    if x.numel() and (not at or has < (x.storage_offset() + x.numel()) * x.element_size()):
        raise ValueError(
            f"{x.dtype}{list(x.shape)} at element {x.storage_offset()} of a storage of {has} bytes "
            f"is not in memory (address {at:#x}): that was freed or cut, or the tensor is fake"
        )
    return at
