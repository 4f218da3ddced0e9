"""One bucket's memory: several parameters' gradients in a flat buffer that is reduced at once.

Note [gradients live in their bucket]
    Once a gradient is copied into its bucket, `p.grad` becomes a view of it: autograd's tensor is
    freed at once, and nothing is copied back after the reduction. With
    gradient_as_bucket_view=False, torch's default, the gradients of each step must have memory of
    their own. So if the user still holds gradients of the last step when new ones come (a list, a
    slice, an array), the bucket leaves its memory to them and allocates another.
    Tried and dropped: leaving gradients of this rank's own part where autograd put them, as no
    other rank reads them (no faster on 2 ranks: the copies are in cache, and a gradient that lives
    on needs new memory for the next); making the factor a tensor once (saves 3 of 19 us for a small
    gradient, but under torch's tracing it is a fake tensor, and later gradients are not scaled);
    non-temporal stores into the bucket (1.4 % faster with 55 MB of gradients, slower with 4 MiB,
    which caches hold until a peer reads them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ringdp.comm import Communicator
from ringdp.parallel.ddp.profiling import all_reduce
from ringdp.parallel.memory import holders


class Slot(NamedTuple):
    """Where a parameter's gradient lies in the flat buffer; `offset` in elements."""

    parameter: nn.Parameter
    offset: int
    stride: tuple[int, ...]


class Bucket(Protocol):
    """What is reduced at once: a flat buffer (FlatBucket) or one sparse gradient (SparseBucket).

    `place`: a parameter's index in `slots`."""

    index: int
    comm: Communicator
    slots: list[Slot]
    pending: int  # gradients still to come

    def arm(self) -> None:
        """Wait for the gradients of the next backward."""

    def take(self, place: int, scale: float) -> None:
        """Move p.grad in, times `scale`; p.grad will be the result."""

    def take_unused(self, place: int, scale: float) -> None:
        """Copy in a p.grad that this backward did not make; p.grad stays as it is."""

    def hand_out(self, place: int) -> None:
        """p.grad becomes the result, if it was unused on this rank only."""

    def blank(self) -> None:
        """Fill with zeros, in memory that no p.grad uses."""

    def start(self) -> Callable[[], object]:
        """Start the reduction. Returns a function that waits for it."""

    def tensor(self) -> Tensor:
        """The gradients, for a communication hook."""

    def store(self, result: Tensor) -> None:
        """Take a communication hook's result."""


class FlatBucket:
    """A Bucket in the communicator's memory, which peers read and write in place.

    `shared`: gradient_as_bucket_view, so the user expects gradients to be overwritten."""

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

    def take(self, place: int, scale: float) -> None:
        self._own()
        parameter, part = self.slots[place].parameter, self._parts[place]
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = part.data.zero_()
        elif self._is_here(gradient, place):
            gradient.detach().mul_(scale)
        else:
            torch.mul(gradient.detach(), scale, out=part)
            parameter.grad = part.data

    def take_unused(self, place: int, scale: float) -> None:
        parameter, part = self.slots[place].parameter, self._parts[place]
        if self._is_here(parameter.grad, place):
            parameter.grad = part.clone()
        self._own()
        part = self._parts[place]
        if parameter.grad is None:
            part.zero_()
        else:
            torch.mul(parameter.grad.detach(), scale, out=part)

    def hand_out(self, place: int) -> None:
        self.slots[place].parameter.grad = self._parts[place].data

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
            self.flat.copy_(result.detach().view(-1))

    def _is_here(self, gradient: Tensor | None, place: int) -> bool:
        """Whether the gradient is a view of its place in the buffer."""
        return gradient is not None and gradient.data_ptr() == self._addresses[place]

    def _own(self) -> None:
        """Before a backward's first write: leave memory that the user holds. See Note [gradients
        live in their bucket]."""
        if self._fresh:
            return
        self._fresh = True
        if self.shared:
            return
        here = sum(self._is_here(slot.parameter.grad, i) for i, slot in enumerate(self.slots))
        if holders(self.flat) > self._alone + here:
            self._replace()

    def _replace(self) -> None:
        self.flat = flat = self.comm.empty(self.elements, dtype=self.dtype)
        # p.grad is the `.data` of these: no view to autograd, so the user may detach_() it.
        self._parts = [flat.as_strided(p.shape, stride, at) for p, at, stride in self.slots]
        start, size = flat.data_ptr(), flat.element_size()
        self._addresses = [start + slot.offset * size for slot in self.slots]
        self._alone = holders(self.flat)


def _dense_stride(p: Tensor) -> tuple[int, ...]:
    """The parameter's strides if it is dense (channels last, say), else row-major ones."""
    return torch.empty_like(p, device="meta").stride()
