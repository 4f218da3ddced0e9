"""Tensors in memory that all ranks of a host have mapped: peers read and write them in place.

The arena is one sparse anonymous file, which every rank maps whole; rank r allocates in the r-th
part. A tensor's memory is committed when it is made, and reused when its last view is gone.

Note [the collector comes at any time]
    Garbage collection may run while this very thread allocates. So a tensor's finalizer takes no
    lock and changes no table: it appends its memory to a list, which the next allocation frees.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from math import prod

import numpy as np
import torch
from torch import Tensor

from ringdp.errors import CommunicationError

ALIGNMENT = 64  # bytes: tensors share no cache line
VIRTUAL = 1 << 44  # most bytes of address space for one arena


def arena_bytes(ranks: int) -> int:
    """Return the arena's address space: for each rank, as much as the host has memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory, VIRTUAL // ranks) // mmap.PAGESIZE * mmap.PAGESIZE * ranks


class Arena:
    """One rank's mapping of the whole arena, and the allocator of its part."""

    def __init__(self, fd: int, rank: int, ranks: int) -> None:
        """Map `fd`, of `arena_bytes(ranks)` bytes, and keep a duplicate of it."""
        self.bytes = arena_bytes(ranks)
        if (found := os.fstat(fd).st_size) != self.bytes:
            raise CommunicationError(f"the shared arena has {found} bytes instead of {self.bytes}")
        self._map = mmap.mmap(fd, self.bytes, mmap.MAP_SHARED)
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)
        self.address = np.frombuffer(self._map, np.uint8, 1).ctypes.data
        self._part = part = self.bytes // ranks
        self._free = [(rank * part, (rank + 1) * part)]  # [begin, end), sorted, disjoint
        self._returned: list[tuple[int, int]] = []  # by finalizers, not yet in `_free`
        self._held: deque[tuple[Callable[[], bool], list[torch.UntypedStorage]]] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor. Raises CommunicationError if memory is short."""
        used = prod(shape) * dtype.itemsize
        if used == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = -(-used // ALIGNMENT) * ALIGNMENT
        begin = self._take(size)
        block = np.frombuffer(self._map, np.uint8, used, begin)  # the tensor's storage keeps it
        # See Note [the collector comes at any time].
        weakref.finalize(block, self._returned.append, (begin, begin + size)).atexit = False
        return torch.from_numpy(block).view(dtype).view(shape)

    def hold(self, used: Iterable[object], until: Callable[[], bool]) -> None:
        """Keep storages, or tensors' storages, that lie in the arena alive until `until()` is true.

        They belong to a failed call, and a late rank may still write to them. Takes no lock: see
        Note [the collector comes at any time].
        """
        within = range(self.address, self.address + self.bytes)
        memory = (x.untyped_storage() if isinstance(x, torch.Tensor) else x for x in used)
        storages = [x for x in memory if isinstance(x, torch.UntypedStorage)]
        if here := [x for x in storages if x.data_ptr() in within]:
            self._held.append((until, here))

    def _take(self, size: int) -> int:
        with self._lock:
            self._join()
            for i, (begin, end) in enumerate(self._free):
                if end - begin >= size:
                    try:  # so that out of memory is an error here and not a SIGBUS later
                        os.posix_fallocate(self._fd, begin, size)
                    except OSError as e:
                        why = f"no memory for {size:,} shared bytes: {e.strerror}"
                        raise CommunicationError(why) from e
                    self._free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                    return begin
            most = max((end - begin for begin, end in self._free), default=0)
        raise CommunicationError(
            f"no room in the arena for {size:,} bytes: of this rank's {self._part:,}, {most:,} are "
            "free in one piece; drop tensors made with `empty`, or ask for less"
        )

    def _join(self) -> None:
        """Move what is no longer held, and what finalizers returned, to `_free`, and merge it."""
        for _ in range(len(self._held)):
            until, storages = self._held.popleft()
            if not until():
                self._held.append((until, storages))
            del storages
        while self._returned:
            insort(self._free, self._returned.pop())
        joined: list[tuple[int, int]] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self._free = joined
