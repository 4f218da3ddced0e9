"""What is reduced at once: a flat buffer of several gradients, or one sparse gradient.

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
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ringdp.comm import Communicator
from ringdp.comm.backend.sparse import sum_of_sparse
from ringdp.errors import ModelError
from ringdp.parallel.accounting.memory import holders
from ringdp.parallel.ddp.arguments import Trainable
from ringdp.parallel.ddp.profiling import all_reduce


class Slot(NamedTuple):
    """Where a parameter's gradient lies in the flat buffer; `offset` in elements."""

    parameter: nn.Parameter
    offset: int
    stride: tuple[int, ...]


class FlatBucket:
    """Several gradients in the communicator's memory, which peers read and write in place.

    `place`: a parameter's index in `slots`. `shared`: gradient_as_bucket_view, so the user expects
    gradients to be overwritten."""

    def __init__(
        self, index: int, of: Sequence[Trainable], comm: Communicator, *, shared: bool
    ) -> None:
        self.index, self.comm, self.shared = index, comm, shared
        self.names = [t.name for t in of]
        self.pending = len(of)  # gradients still to come
        self.slots: list[Slot] = []
        self.elements, self.dtype = 0, of[0].parameter.dtype
        for _, p, _ in of:
            # The parameter's own if it is dense (channels last, say), else row-major.
            stride = torch.empty_like(p, device="meta").stride()
            self.slots.append(Slot(p, self.elements, stride))
            self.elements += p.numel()
        self._replace()

    def arm(self) -> None:
        """Wait for the gradients of the next backward."""
        self.pending = len(self.slots)

    def take(self, place: int, scale: float, *, unused: bool) -> None:
        """Move p.grad in, times `scale`; p.grad becomes the result. If `unused`, this backward did
        not make it: it is copied, and stays as it is unless `hand_out` is called."""
        parameter = self.slots[place].parameter
        if unused and self._is_here(parameter.grad, place):
            parameter.grad = self._parts[place].clone()
        self._own()
        gradient, part = parameter.grad, self._parts[place]
        if self._is_here(gradient, place):
            gradient.detach().mul_(scale)
            return
        if gradient is None:
            part.zero_()
        else:
            torch.mul(gradient.detach(), scale, out=part)
        if not unused:
            parameter.grad = part.data

    def hand_out(self, place: int) -> None:
        """p.grad becomes the result, where it was unused on this rank only."""
        self.slots[place].parameter.grad = self._parts[place].data

    def blank(self) -> None:
        """Fill with zeros, in memory that no p.grad uses."""
        self._replace()
        self.flat.zero_()

    def start(self) -> Callable[[], object]:
        """Start the reduction. Returns a function that waits for it."""
        return all_reduce(self.comm, self.tensor(), tag=self.index)

    def tensor(self) -> Tensor:
        """The gradients, for a communication hook; of complex ones both parts."""
        return torch.view_as_real(self.flat).view(-1) if self.flat.is_complex() else self.flat

    def store(self, result: Tensor) -> None:
        """Take a communication hook's result."""
        if result.data_ptr() != self.flat.data_ptr():
            self.tensor().copy_(result.detach().view(-1))

    def _is_here(self, gradient: Tensor | None, place: int) -> TypeGuard[Tensor]:
        """Whether the gradient is a view of its place in the buffer. Raises ModelError for a sparse
        one."""
        if gradient is None:
            return False
        try:
            return gradient.data_ptr() == self._addresses[place]
        except RuntimeError as error:
            if gradient.layout is torch.strided:
                raise
            raise ModelError(
                f"Expected {self.names[place]} to have a dense gradient: sparse ones are taken of "
                "nn.Embedding and nn.EmbeddingBag, which say sparse=True beforehand"
            ) from error

    def _own(self) -> None:
        """Before a backward's first write: leave memory that the user holds. See Note [gradients
        live in their bucket]."""
        if self.shared or self.pending < len(self.slots):
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


class SparseBucket:
    """One sparse gradient, as of nn.Embedding(sparse=True), of which ranks exchange the rows and
    their indices. The methods are FlatBucket's. Without memory between backwards."""

    def __init__(self, index: int, of: Trainable, comm: Communicator) -> None:
        self.index, self.name, self.comm = index, of.name, comm
        self.slots = [Slot(of.parameter, 0, of.parameter.stride())]
        self.pending, self._unused = 1, True
        self._sum = of.parameter.detach().new_empty(0)

    def arm(self) -> None:
        self.pending, self._unused = 1, True

    def take(self, place: int, scale: float, *, unused: bool) -> None:
        gradient = self.slots[place].parameter.grad
        if gradient is None:
            self.blank()
        elif not gradient.is_sparse:
            raise ModelError(f"Expected {self.name} to have sparse gradient, as its module says")
        else:
            self._sum = gradient.detach() * scale
        self._unused = unused

    def hand_out(self, place: int) -> None:
        self.slots[place].parameter.grad = self._sum

    def blank(self) -> None:
        p = self.slots[0].parameter
        rows = p.detach().new_empty(0, *p.shape[1:])
        indices = rows.new_empty(1, 0, dtype=torch.int64)
        self._sum = torch.sparse_coo_tensor(
            indices, rows, p.shape, check_invariants=False, device=p.device
        )

    def start(self) -> Callable[[], object]:
        return lambda: self.store(sum_of_sparse(self.comm, self._sum, tag=self.index))

    def tensor(self) -> Tensor:
        return self._sum

    def store(self, result: Tensor) -> None:
        self._sum = result
        if not self._unused:
            self.hand_out(0)


Bucket = FlatBucket | SparseBucket
