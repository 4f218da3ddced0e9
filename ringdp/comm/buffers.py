"""Converts tensors to the flat buffers that programs run on, and back.

A buffer is 1-D, contiguous, real and detached. It is the tensor's own memory if the tensor is
contiguous, and otherwise a copy, which `copy_back` writes back. A complex number is two real
elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.comm.arguments import real_dtype
from ringdp.errors import UsageError


class Flat(NamedTuple):
    """A tensor's elements as a buffer. `original` is the tensor if `data` is a copy, else None."""

    data: Tensor  # [elements x width]
    original: Tensor | None

    def copy_back(self) -> None:
        """Copy the buffer back to the tensor, if it is a copy."""
        if self.original is not None:
            writable(self.original).copy_(shaped(self.data, self.original))

    def take(self, *pieces: Tensor) -> None:
        """Copy a result to the tensor. Only one that is in one piece may overlap the buffer."""
        if len(pieces) == 1:
            fill(self.data, *pieces)
        else:
            torch.cat(pieces, out=writable(self.data))
        self.copy_back()


def flat(tensor: Tensor, *, read: bool = True) -> Flat:
    """Return the tensor as a buffer. Unless `read`, a copy is uninitialised, to be overwritten.

    Raises UsageError if the tensor has no memory, such as a fake one or one that FSDP has freed.
    """
    data = tensor.detach()
    if not tensor.is_meta and lacks_memory(data):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} has no memory of its own: it is a fake one, "
            "or stands for others (a DTensor, or one that torch.func made), or its storage was "
            "freed or cut; allowed: a tensor whose elements are in memory"
        )
    data, original = writable(data), None
    if not plain(data):
        original = data
        if read:
            data = data.resolve_conj().resolve_neg().contiguous()
        else:
            data = torch.empty(data.shape, dtype=data.dtype, device=data.device)
    if data.is_complex():
        data = torch.view_as_real(data)
    return Flat(data if data.dim() == 1 else data.view(-1), original)


def writable(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that may be written here.

    Outside inference mode torch refuses to modify a tensor that was created in it.
    """
    if not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    plain.set_(storage, offset, tensor.shape, tensor.stride())
    plain = plain.conj() if tensor.is_conj() else plain
    return torch._neg_view(plain) if tensor.is_neg() else plain


def lacks_memory(tensor: Tensor) -> bool:
    """Return whether the tensor has elements without memory, or beyond the end of its storage."""
    if tensor.numel() == 0:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    spread = tensor.numel() - 1
    if not tensor.is_contiguous():
        spread = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + spread + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() < end or tensor.data_ptr() == 0


def flat_output(tensor: Tensor, what: str, *, read: bool = False) -> Flat:
    """`flat` for a tensor that will be written. Raises UsageError if its elements share memory."""
    shared = zip(tensor.stride(), tensor.shape, strict=True)
    if not tensor.is_contiguous() and any(s == 0 and n > 1 for s, n in shared):
        raise UsageError(
            f"{what} of shape {tuple(tensor.shape)} was made by expand(): several of its elements "
            "share one place in memory; allowed: a tensor whose elements have a place each"
        )
    return flat(tensor, read=read)


def empty(elements: int, like: Tensor) -> Tensor:
    """Return a new buffer of that many real elements, with the dtype and device of `like`."""
    return torch.empty(elements, dtype=real_dtype(like), device=like.device)


def fill(buffer: Tensor, source: Tensor) -> None:
    """Copy the elements of `source` into a buffer, which may be or overlap its memory."""
    source = source.detach()
    if same(buffer, source):
        return
    if buffer.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        source = source.clone()
    shaped(writable(buffer), source).copy_(source)


def without_overlap(source: Tensor, out: Tensor, in_place: bool = False) -> Tensor:
    """Return `source`, or a copy if it shares memory with `out`, unless that is `in_place`."""
    a, b = source.data_ptr(), out.data_ptr()
    overlaps = a < b + out.nbytes and b < a + source.nbytes
    return source.clone() if overlaps and not in_place else source


def shaped(buffer: Tensor, like: Tensor) -> Tensor:
    """Return a view of the buffer with the shape and (real or complex) dtype of `like`."""
    if like.is_complex():
        return torch.view_as_complex(buffer.view(*like.shape, 2))
    return buffer.view(like.shape)


def same(buffer: Tensor, tensor: Tensor) -> bool:
    """Return whether the tensor is the buffer: the same (non-null) memory in the same order."""
    return buffer.data_ptr() == tensor.data_ptr() != 0 and plain(tensor)


def plain(tensor: Tensor) -> bool:
    """Return whether its memory holds exactly its elements, in order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def type_of(tensor: Tensor) -> str:
    """Return, for errors, what tensors that exchange elements must share: dtype and device."""
    return f"{tensor.dtype} on {tensor.device}"


def width(tensor: Tensor) -> int:
    """Return the number of real elements per element of the tensor."""
    return 2 if tensor.is_complex() else 1
