"""Memory for `ptx`: this process's own, and which of it belongs to tensors."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import torch

from tests.kernels.ptx_numbers import Lanes

PAGE, TOP = 4096, 1 << 47  # all user addresses are between them
TYPES = {8: ctypes.c_uint8, 16: ctypes.c_uint16, 32: ctypes.c_uint32, 64: ctypes.c_uint64}
MEMORY = {  # by bits of an element, whose index is (address - PAGE) / its bytes
    bits: np.ctypeslib.as_array((kind * ((TOP - PAGE) // (bits // 8))).from_address(PAGE))
    for bits, kind in TYPES.items()
}


class Tensors:
    """The memory of all CPU tensors. It is collected again when an access lies outside what is
    known: among the youngest objects first, since all objects are many."""

    def __init__(self) -> None:
        self._begins = self._ends = np.zeros(1, np.uint64)

    def hold(self, at: Lanes, size: int) -> bool:
        """Whether `size` bytes from each of these addresses on lie in one tensor."""
        spans = {0: 0}
        for generation in range(3):
            if self._hold(at, size):
                return True
            self._look(generation, spans)
        return self._hold(at, size)

    def _hold(self, at: Lanes, size: int) -> bool:
        which = np.searchsorted(self._begins, at, side="right") - 1
        return bool((at + np.uint64(size) <= self._ends[which]).all())

    def _look(self, generation: int, spans: dict[int, int]) -> None:
        for x in gc.get_objects(generation):
            if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu":
                storage = x.untyped_storage()
                spans[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
        self._begins = np.array(sorted(spans), np.uint64)
        self._ends = np.array([spans[int(begin)] for begin in self._begins], np.uint64)
