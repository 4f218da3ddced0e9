"""The buckets of torch's DDP, in memory that all ranks have mapped: a peer reads them in place.

torch's Reducer makes its buckets in memory of its own (it asks backends in C++ only), and passes
the same ones in every backward. So a bucket is worth one move, after which no backward copies it to
where its peers can read it: torch swaps the memory beneath a storage and all views of it.

Note [what may be moved]
    A pointer, as an array of numpy has, does not hear of a move. So nobody in Python may have seen
    the tensor: autograd has called us from C++, with nothing of the user's between. There, only the
    Reducer sums tensors: its buckets, or what a hook in C++ makes of them (see `futures`).
"""

from __future__ import annotations

from types import FrameType
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.autograd import graph

from ringdp.comm.communicator import Communicator
from ringdp.errors import CommunicationError

LEAST = 256 << 10  # bytes: what is shorter is laid out as a whole all the same
# What calls autograd's C++, and whether a storage can be moved: from torch 2.12 on.
BACKWARD = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)
SWAPS = BACKWARD is not None and hasattr(UntypedStorage, "_swap_data_ptr_")


def comes_from_autograd(frame: FrameType) -> bool:
    """Whether autograd's C++ has called what runs in that frame, with no Python in between."""
    return BACKWARD is not None and frame.f_back is not None and frame.f_back.f_code is BACKWARD


class Buckets:
    """Those of one communicator, as long as they live."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._seen = comm, WeakSet[UntypedStorage]()
        self._moves = SWAPS and comm.size > 1 and comm.device.type == "cpu"

    def move(self, tensor: Tensor) -> None:
        """A bucket that `comes_from_autograd`, when it comes for the first time."""
        dense = tensor.is_cpu and tensor.layout is torch.strided
        if not (dense and tensor.nbytes >= LEAST and self._moves):
            return
        storage = tensor.untyped_storage()
        if storage in self._seen or storage.nbytes() != tensor.nbytes:
            return
        self._seen.add(storage)  # moved or not: p.grad may be a part of it from now on
        try:
            room = self._comm.empty(tensor.numel(), dtype=tensor.dtype)
        except CommunicationError:  # memory is short: it stays where it is
            return
        room.copy_(tensor.detach().view(-1))
        storage._swap_data_ptr_(room.untyped_storage())  # type: ignore[attr-defined]
