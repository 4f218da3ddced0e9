"""Moves the buckets of torch's DDP to memory that all ranks have mapped: peers read them in place.

torch's Reducer allocates its buckets itself (it asks only C++ backends) and passes the same ones in
every backward. Moving a bucket once saves copying it to shared memory in every backward. torch can
swap the memory of a storage beneath all its views.

Note [what may be moved]
    A raw pointer, such as a numpy array has, does not follow a move. So no Python code may have
    seen the tensor: autograd must have called us from C++, without Python in between. There only
    the Reducer sums tensors: its buckets, or what a C++ hook makes of them (see `futures`).
"""

from __future__ import annotations

from types import FrameType
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.autograd import graph

from ringdp.comm.communicator import Communicator
from ringdp.errors import CommunicationError

LEAST = 256 << 10  # bytes; shorter buckets are copied as a whole anyway
# The Python function that calls autograd's C++. Storages can be swapped from torch 2.12 on.
BACKWARD = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)
SWAPS = BACKWARD is not None and hasattr(UntypedStorage, "_swap_data_ptr_")


def comes_from_autograd(frame: FrameType) -> bool:
    """Return whether autograd's C++ called the function in `frame`, without Python in between."""
    return BACKWARD is not None and frame.f_back is not None and frame.f_back.f_code is BACKWARD


class Buckets:
    """The buckets of one communicator that have been seen, held weakly."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._seen = comm, WeakSet[UntypedStorage]()
        self._moves = SWAPS and comm.size > 1 and comm.device.type == "cpu"

    def move(self, tensor: Tensor) -> None:
        """Move a bucket that `comes_from_autograd` the first time it is seen."""
        dense = tensor.is_cpu and tensor.layout is torch.strided
        if not (dense and tensor.nbytes >= LEAST and self._moves):
            return
        storage = tensor.untyped_storage()
        if storage in self._seen or storage.nbytes() != tensor.nbytes:
            return
        self._seen.add(storage)  # moved or not: from now on p.grad may be a view of it
        try:
            shared = self._comm.empty(tensor.numel(), dtype=tensor.dtype)
        except CommunicationError:  # not enough shared memory: do not move it
            return
        shared.copy_(tensor.detach().view(-1))
        storage._swap_data_ptr_(shared.untyped_storage())  # type: ignore[attr-defined]
