"""Sparse gradients, as of nn.Embedding(sparse=True): ranks exchange rows and their indices.
See `comm.backend.sparse`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringdp.comm import Communicator
from ringdp.comm.backend.sparse import sum_of_sparse
from ringdp.errors import ModelError
from ringdp.parallel.ddp.bucket import Slot
from ringdp.parallel.ddp.settings import Trainable


class SparseBucket:
    """The bucket of one parameter, without memory between backwards. See `bucket.Bucket`."""

    def __init__(self, index: int, of: Trainable, comm: Communicator) -> None:
        self.index, self.name, self.comm = index, of.name, comm
        self.slots = [Slot(of.parameter, 0, of.parameter.stride())]
        self.pending, self._taken = 1, False
        self._sum = of.parameter.detach().new_empty(0)

    def arm(self) -> None:
        self.pending, self._taken = 1, False

    def take(self, place: int, scale: float) -> None:
        self.take_unused(place, scale)
        self._taken = True

    def take_unused(self, place: int, scale: float) -> None:
        gradient = self.slots[place].parameter.grad
        if gradient is None:
            self.blank()
        elif not gradient.is_sparse:
            raise ModelError(f"Expected {self.name} to have sparse gradient, as its module says")
        else:
            self._sum = gradient.detach() * scale

    def hand_out(self, place: int) -> None:
        self.slots[place].parameter.grad = self._sum

    def blank(self) -> None:
        p = self.slots[0].parameter
        rows, indices = p.detach().new_empty(0, *p.shape[1:]), torch.empty(1, 0, dtype=torch.int64)
        self._sum = torch.sparse_coo_tensor(indices, rows, p.shape, check_invariants=False)

    def start(self) -> Callable[[], object]:
        return lambda: self.store(sum_of_sparse(self.comm, self._sum, tag=self.index))

    def tensor(self) -> Tensor:
        return self._sum

    def store(self, result: Tensor) -> None:
        self._sum = result
        if self._taken:
            self.hand_out(0)
