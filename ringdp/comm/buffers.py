"""Tensors of any form as the flat buffers that programs run on, and back.

A buffer is 1-D, contiguous, real and detached. It is the tensor's own memory where the tensor's
form allows that; else a copy, which `settle` brings home. A complex number is two real elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringdp.errors import UsageError


class Flat(NamedTuple):
    """A tensor's elements as a buffer; `home` is where they have to be copied, None: nowhere."""

    data: Tensor  # [elements x width]
    home: Tensor | None

    def settle(self) -> None:
        if self.home is not None:
            writable(self.home).copy_(shaped(self.data, self.home))


def flat(tensor: Tensor, *, read: bool = True) -> Flat:
    """The tensor as a buffer. If not `read`, a copy holds anything: all of it will be written.

    Raises UsageError for a tensor without memory, such as a fake one or one that FSDP has freed.
    """
    data = tensor.detach()
    if tensor.device.type != "meta" and lacks_memory(data):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} has no memory of its own: it is a fake one, "
            "or stands for others (a DTensor, or one that torch.func made), or its storage was "
            "freed or cut; allowed: a tensor whose elements are in memory"
        )
    data, home = writable(data), None
    if not plain(data):
        home = data
        if read:
            data = data.resolve_conj().resolve_neg().contiguous()
        else:
            data = torch.empty(data.shape, dtype=data.dtype, device=data.device)
    if data.is_complex():
        data = torch.view_as_real(data)
    return Flat(data.view(-1), home)


def writable(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that torch lets us write: outside of inference mode it refuses to
    change one that was made there."""
    if not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    plain.set_(storage, offset, tensor.shape, tensor.stride())
    plain = plain.conj() if tensor.is_conj() else plain
    return torch._neg_view(plain) if tensor.is_neg() else plain


def lacks_memory(tensor: Tensor) -> bool:
    """Whether elements lie nowhere, or behind the end of the tensor's storage."""
    if tensor.numel() == 0:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() < end or tensor.data_ptr() == 0


def flat_output(tensor: Tensor, what: str, *, read: bool = False) -> Flat:
    """The same, for a tensor that will be written: UsageError where elements share their memory."""
    if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError(
            f"{what} of shape {tuple(tensor.shape)} was made by expand(): several of its elements "
            "share one place in memory; allowed: a tensor whose elements have a place each"
        )
    return flat(tensor, read=read)


def empty(elements: int, like: Tensor) -> Tensor:
    """A new buffer of that many real elements, for the tensor's dtype and device."""
    dtype = like.dtype.to_real() if like.is_complex() else like.dtype
    return torch.empty(elements, dtype=dtype, device=like.device)


def fill(buffer: Tensor, source: Tensor) -> None:
    """Copy a tensor's elements into a buffer, which may be that tensor's memory or overlap it."""
    source = source.detach()
    if same(buffer, source):
        return
    if buffer.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        source = source.clone()
    shaped(writable(buffer), source).copy_(source)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def apart(source: Tensor, out: Tensor, in_place: bool = False) -> Tensor:
    """The source; or a copy, if it shares memory with what will be written, and is not `in_place`
    there."""
    return source.clone() if overlap(source, out) and not in_place else source


def shaped(buffer: Tensor, like: Tensor) -> Tensor:
    """The buffer's elements, in the shape and (real or complex) dtype of `like`."""
    if like.is_complex():
        return torch.view_as_complex(buffer.view(*like.shape, 2))
    return buffer.view(like.shape)


def same(buffer: Tensor, tensor: Tensor) -> bool:
    """Whether the tensor is the buffer: the same memory in the same order. (None is nobody's.)"""
    return buffer.data_ptr() == tensor.data_ptr() != 0 and plain(tensor)


def plain(tensor: Tensor) -> bool:
    """Whether its memory has its elements one by one, as they are."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def form_of(tensor: Tensor) -> str:
    """What tensors that exchange elements must have in common, as errors say it."""
    return f"{tensor.dtype} on {tensor.device}"


def width(tensor: Tensor) -> int:
    """Real elements of the buffer for each element of the tensor."""
    return 2 if tensor.is_complex() else 1
