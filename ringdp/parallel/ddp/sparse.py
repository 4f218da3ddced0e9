"""Sparse gradients, of nn.Embedding(sparse=True): what ranks exchange is rows and their indices.

    result = sum over ranks, in rank order, of the coalesced gradients

Every rank gathers, from each, as many rows as the rank with most has: 8 bytes an index, and values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ringdp.comm import Communicator
from ringdp.errors import ModelError
from ringdp.parallel.ddp.bucket import Slot


class SparseBucket:
    """One parameter. See `bucket.Bucket`; it has no memory between backwards."""

    def __init__(self, index: int, name: str, parameter: nn.Parameter, comm: Communicator) -> None:
        self.index, self.name, self.comm = index, name, comm
        self.slots = [Slot(parameter, 0, parameter.stride())]
        self.pending, self._taken = 1, False
        self._sum = parameter.detach().new_empty(0)

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
        return lambda: self.store(all_reduce_sparse(self.comm, self._sum, tag=self.index))

    def tensor(self) -> Tensor:
        return self._sum

    def store(self, result: Tensor) -> None:
        self._sum = result
        if self._taken:
            self.hand_out(0)


def all_reduce_sparse(comm: Communicator, gradient: Tensor, *, tag: int) -> Tensor:
    """The sum over ranks of a COO tensor, coalesced. Collective."""
    gradient = gradient.coalesce()
    counts = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(counts, torch.tensor([gradient._nnz()]), tag=tag)
    most = int(counts.max())
    indices = _gather(comm, gradient.indices().t(), most, tag)  # [ranks, most, sparse dims]
    values = _gather(comm, gradient.values(), most, tag)  # [ranks, most, ...]
    ranks = [
        torch.sparse_coo_tensor(
            i[:count].t(), v[:count], gradient.shape, is_coalesced=True, check_invariants=False
        )
        for i, v, count in zip(indices, values, counts.tolist(), strict=True)
    ]
    total = ranks[0]
    for one in ranks[1:]:
        total = total + one
    return total.coalesce()


def _gather(comm: Communicator, rows: Tensor, most: int, tag: int) -> Tensor:
    """Every rank's rows, filled up to `most`."""
    padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    whole = rows.new_empty(comm.size * most, *rows.shape[1:])
    comm.all_gather(whole, padded, tag=tag)
    return whole.view(comm.size, most, *rows.shape[1:])
