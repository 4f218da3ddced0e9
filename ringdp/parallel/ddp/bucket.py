"""One bucket's memory: gradients of several parameters in a flat buffer that is reduced at once.

Note [gradients live in their bucket]
    Once a gradient has been copied into its bucket, `p.grad` becomes that part of it, so that
    autograd's tensor is freed at once, and nothing is copied back after the reduction. With
    gradient_as_bucket_view=False, torch's default, every step's gradients must have a memory of
    their own. So if somebody still holds gradients of the last step when the next come in (a list
    of them, a slice, an array), the bucket leaves its memory to them and takes another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ringdp.comm import Communicator
from ringdp.parallel.ddp.profiled import all_reduce


class Slot(NamedTuple):
    """Where a parameter's gradient lies in the flat buffer; `offset` in elements."""

    parameter: nn.Parameter
    offset: int
    stride: tuple[int, ...]


class Bucket(Protocol):
    """What is reduced at once: a flat buffer here, one sparse gradient in `sparse`."""

    index: int
    comm: Communicator
    slots: list[Slot]
    pending: int  # gradients that it waits for

    def arm(self) -> None:
        """A backward lies ahead."""

    def take(self, slot: Slot, scale: float) -> None:
        """Move p.grad times `scale` in; p.grad will be the reduction's result."""

    def take_unused(self, slot: Slot, scale: float) -> None:
        """The same for a p.grad that this backward did not make; it stays as it is."""

    def hand_out(self, slot: Slot) -> None:
        """p.grad becomes the result, for a gradient that was unused here only."""

    def blank(self) -> None:
        """Zeros, in a memory that no p.grad has."""

    def start(self) -> Callable[[], object]:
        """Begin to reduce; the result is there once the returned function has returned."""

    def tensor(self) -> Tensor:
        """What a communication hook works on."""

    def store(self, result: Tensor) -> None:
        """What a communication hook has made."""


class FlatBucket:
    """See `Bucket`. Its memory is the communicator's, so that peers read and write it in place.

    `shared`: the user knows that gradients are overwritten."""

    def __init__(
        self, index: int, parameters: Sequence[nn.Parameter], comm: Communicator, *, shared: bool
    ) -> None:
        self.index, self.comm, self.shared = index, comm, shared
        self.pending = len(parameters)
        self.slots: list[Slot] = []
        self.elements, self.dtype = 0, parameters[0].dtype
        for p in parameters:
            self.slots.append(Slot(p, self.elements, _dense_stride(p)))
            self.elements += p.numel()
        self._fresh = False  # whether this backward has written to it
        self._replace()

    def arm(self) -> None:
        self.pending, self._fresh = len(self.slots), False

    def take(self, slot: Slot, scale: float) -> None:
        self._own()
        gradient = slot.parameter.grad
        if gradient is None:
            slot.parameter.grad = self._view(slot).zero_()
        elif self._holds(slot):
            gradient.detach().mul_(scale)
        else:
            view = self._view(slot)
            torch.mul(gradient.detach(), scale, out=view)
            slot.parameter.grad = view

    def take_unused(self, slot: Slot, scale: float) -> None:
        if self._holds(slot):
            slot.parameter.grad = self._view(slot).clone()
        self._own()
        gradient = slot.parameter.grad
        if gradient is None:
            self._view(slot).zero_()
        else:
            torch.mul(gradient.detach(), scale, out=self._view(slot))

    def hand_out(self, slot: Slot) -> None:
        slot.parameter.grad = self._view(slot)

    def blank(self) -> None:
        self._replace()
        self.flat.zero_()

    def start(self) -> Callable[[], object]:
        flat = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat
        return all_reduce(self.comm, flat, tag=self.index).wait

    def tensor(self) -> Tensor:
        return self.flat

    def store(self, result: Tensor) -> None:
        if result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(result.view(-1))

    def _view(self, slot: Slot) -> Tensor:
        """The slot's part of the buffer. `.data`: to its user it is no view, and may detach_()."""
        return self.flat.as_strided(slot.parameter.shape, slot.stride, slot.offset).data

    def _holds(self, slot: Slot) -> bool:
        """Whether p.grad is the slot's part of the buffer."""
        gradient = slot.parameter.grad
        address = self.flat.data_ptr() + slot.offset * self.flat.element_size()
        return gradient is not None and gradient.data_ptr() == address

    def _own(self) -> None:
        """Before a backward's first write. See Note [gradients live in their bucket]."""
        if self._fresh:
            return
        self._fresh = True
        if self.shared:
            return
        if _holders(self.flat) > self._alone + sum(map(self._holds, self.slots)):
            self._replace()

    def _replace(self) -> None:
        self.flat = self.comm.empty(self.elements, dtype=self.dtype)
        self._alone = _holders(self.flat)


def _holders(flat: Tensor) -> int:
    """How many tensors share the memory, and a constant."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


def _dense_stride(p: Tensor) -> tuple[int, ...]:
    """The parameter's own strides where it fills its memory (channels last), else row-major."""
    return torch.empty_like(p, device="meta").stride()
