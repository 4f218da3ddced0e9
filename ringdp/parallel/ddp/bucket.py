"""One bucket's memory: gradients of several parameters in a flat buffer that is reduced at once.

Note [gradients live in their bucket]
    Once a gradient has been copied into its bucket, `p.grad` becomes that part of it, so that
    autograd's tensor is freed at once, and nothing is copied back after the reduction. With
    gradient_as_bucket_view=False, torch's default, every step's gradients must have a memory of
    their own. So if somebody still holds gradients of the last step when the next come in (a list
    of them, a slice, an array), the bucket leaves its memory to them and takes another.
    Not kept: to leave gradients where autograd put them that lie in this rank's own part, which no
    other rank reads. No step of 2 ranks was faster without half of the copies: they are of hot
    memory, and a gradient that lives on takes new memory for the next. Nor the factor as a tensor
    made once, for 3 of the 19 us that a small gradient takes: where one is made while torch traces,
    it is a fake one, and the next backward's gradients stay what they were. Nor stores around the
    caches into the bucket: a step with 55 MB of gradients took 1.4 % less, but 4 MiB in all, which
    the caches hold until a peer reads them, took longer on the whole.
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
    """What is reduced at once: a flat buffer here, one sparse gradient in `sparse`.

    `place`: of a parameter in `slots`."""

    index: int
    comm: Communicator
    slots: list[Slot]
    pending: int  # gradients that it waits for

    def arm(self) -> None:
        """A backward lies ahead."""

    def take(self, place: int, scale: float) -> None:
        """Move p.grad times `scale` in; p.grad will be the reduction's result."""

    def take_unused(self, place: int, scale: float) -> None:
        """The same for a p.grad that this backward did not make; it stays as it is."""

    def hand_out(self, place: int) -> None:
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
        """Whether it is that part of the buffer."""
        return gradient is not None and gradient.data_ptr() == self._addresses[place]

    def _own(self) -> None:
        """Before a backward's first write. See Note [gradients live in their bucket]."""
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
        # As `.data` they are p.grad: to its user that is no view, and may detach_().
        self._parts = [flat.as_strided(p.shape, stride, at) for p, at, stride in self.slots]
        start, size = flat.data_ptr(), flat.element_size()
        self._addresses = [start + slot.offset * size for slot in self.slots]
        self._alone = holders(self.flat)


def _dense_stride(p: Tensor) -> tuple[int, ...]:
    """The parameter's own strides where it fills its memory (channels last), else row-major."""
    return torch.empty_like(p, device="meta").stride()
