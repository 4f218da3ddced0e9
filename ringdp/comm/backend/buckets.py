"""The buckets of torch's DDP, in memory that all ranks have mapped: a peer reads them in place.

torch's Reducer makes its buckets in memory of its own (it asks backends in C++ only), and passes
the same ones in every backward. So a bucket is worth one move, after which no backward copies it to
where its peers can read it: torch swaps the memory beneath a storage and all views of it.

Note [what may be moved]
    A pointer, as an array of numpy has, does not hear of a move. So nobody in Python may have seen
    the tensor: autograd has called us from C++, with nothing of the user's between. There, only the
    Reducer sums tensors, and no others than its buckets unless a hook in C++ is in its place.
"""

from __future__ import annotations

import sys
from types import CodeType
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.autograd import graph

from ringdp.comm.communicator import Communicator
from ringdp.errors import CommunicationError

LEAST = 256 << 10  # bytes: what is shorter is laid out as a whole all the same
BACKWARD: CodeType = graph._engine_run_backward.__code__  # calls autograd's C++
SWAPS = hasattr(UntypedStorage, "_swap_data_ptr_")  # from torch 2.12 on


class Buckets:
    """Those of one communicator that have been moved, as long as they live."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._moved = comm, WeakSet[UntypedStorage]()
        self._shares = SWAPS and comm.empty(0).is_cpu

    def move(self, tensor: Tensor) -> None:
        """Once, and if it is a bucket. To be called by what torch calls."""
        dense = tensor.is_cpu and tensor.layout is torch.strided
        if not (dense and tensor.nbytes >= LEAST and self._shares):
            return
        caller = sys._getframe(1).f_back  # whom torch has come from
        if caller is None or caller.f_code is not BACKWARD:
            return
        storage = tensor.untyped_storage()
        if storage in self._moved or storage.nbytes() != tensor.nbytes:
            return
        try:
            room = self._comm.empty(tensor.numel(), dtype=tensor.dtype)
        except CommunicationError:  # memory is short: it stays where it is
            return
        room.copy_(tensor.detach().view(-1))
        storage._swap_data_ptr_(room.untyped_storage())  # type: ignore[attr-defined]
        self._moved.add(storage)
