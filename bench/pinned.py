"""Where a measured rank runs: with one thread, on a core of its own while there are enough.

Note [freed memory stays]
    glibc hands freed memory back to the kernel as the heap happens to lie, and the next step pays
    for it with up to 16,000 page faults (10 % of a training step), or none. It is told to keep
    what was freed, so that every side of a comparison pays for its work alone.
"""

from __future__ import annotations

import ctypes
import os

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def pin(rank: int) -> None:
    """Raises OSError where glibc refuses."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    libc = ctypes.CDLL(None)
    for option, value in (
        (M_TRIM_THRESHOLD, 2**31 - 1),
        (M_TOP_PAD, 64 << 20),
        (M_MMAP_THRESHOLD, 32 << 20),
    ):
        if not libc.mallopt(option, value):
            raise OSError(f"mallopt({option}, {value}) is refused")
