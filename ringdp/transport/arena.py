"""Tensors in memory that all ranks of a host have mapped: peers read and write them in place.

One sparse anonymous file, mapped whole by every rank; rank r allocates in the r-th part of it.
Memory is taken when a tensor is made, and used again when its last view is gone.

Note [the collector comes at any time]
    What is collected may be found while this very thread allocates. So the end of a tensor takes no
    lock and changes no table: it puts its memory down, and whoever allocates next picks it up.
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
VIRTUAL = 1 << 44  # bytes of address space that an arena may ask for


def arena_bytes(ranks: int) -> int:
    """Address space for `ranks` ranks: as much as there is memory, for each of them."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory, VIRTUAL // ranks) // mmap.PAGESIZE * mmap.PAGESIZE * ranks


class Arena:
    """One rank's view of the whole arena, and the allocator of its part."""

    def __init__(self, fd: int, rank: int, ranks: int) -> None:
        """Maps `fd`, of `arena_bytes(ranks)` bytes, and keeps a duplicate of it."""
        self.bytes = arena_bytes(ranks)
        if (found := os.fstat(fd).st_size) != self.bytes:
            raise CommunicationError(f"the shared arena has {found} bytes instead of {self.bytes}")
        self._map = mmap.mmap(fd, self.bytes, mmap.MAP_SHARED)
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)
        self.address = np.frombuffer(self._map, np.uint8, 1).ctypes.data
        self._part = part = self.bytes // ranks
        self._free = [(rank * part, (rank + 1) * part)]  # [begin, end), sorted, apart
        self._back: list[tuple[int, int]] = []  # of them, those whose tensor has gone since
        self._held: deque[tuple[Callable[[], bool], list[torch.UntypedStorage]]] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor. Raises CommunicationError where memory is short."""
        used = prod(shape) * dtype.itemsize
        size = max(1, -(-used // ALIGNMENT)) * ALIGNMENT
        begin = self._take(size)
        block = np.frombuffer(self._map, np.uint8, used, begin)  # torch keeps it for the storage
        # See Note [the collector comes at any time].
        weakref.finalize(block, self._back.append, (begin, begin + size)).atexit = False
        if used == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(block).view(dtype).view(shape)

    def hold(self, used: Iterable[object], until: Callable[[], bool]) -> None:
        """Keep those storages among `used` that lie here, `until()`: a failed call's, to which a
        rank that is late may still write. See Note [the collector comes at any time].
        """
        within = range(self.address, self.address + self.bytes)
        storages = [x for x in used if isinstance(x, torch.UntypedStorage)]
        if here := [x for x in storages if x.data_ptr() in within]:
            self._held.append((until, here))

    def _take(self, size: int) -> int:
        with self._lock:
            self._join()
            for i, (begin, end) in enumerate(self._free):
                if end - begin >= size:
                    try:  # out of memory is an error here, not a SIGBUS later
                        os.posix_fallocate(self._fd, begin, size)
                    except OSError as e:
                        why = f"no memory for {size:,} shared bytes: {e.strerror}"
                        raise CommunicationError(why) from e
                    self._free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                    return begin
            most = max((end - begin for begin, end in self._free), default=0)
        raise CommunicationError(
            f"no room in the arena for {size:,} bytes: of this rank's {self._part:,}, {most:,} are "
            "free in one piece; let go of tensors that `empty` has given, or ask for less"
        )

    def _join(self) -> None:
        """Make what has come back free again."""
        for _ in range(len(self._held)):
            until, storages = self._held.popleft()
            if not until():
                self._held.append((until, storages))
            del storages
        while self._back:
            insort(self._free, self._back.pop())
        joined: list[tuple[int, int]] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self._free = joined
