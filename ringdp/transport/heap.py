"""Makes the process keep the memory that a training step frees, for the next step.

glibc returns free memory at the end of the heap to the system; using it again costs one page fault
per 4 KiB. How many a step has depends on what happens to lie there; `python -m bench.ddp_step`
measures their cost. torch's CUDA allocator keeps freed memory, too.

Two limits stay: blocks from 32 MiB up are always mapped and unmapped, and once 2 GiB are free at
the end of the heap, glibc returns them. `malloc_trim(0)` returns what is kept.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
TRIM_THRESHOLD = 2**31 - 1  # bytes free at the heap's end: the most that mallopt's int holds
MMAP_THRESHOLD = 32 << 20  # bytes of a block: the most that glibc allows, or reaches by itself
SETTINGS = ("TRIM_THRESHOLD_", "TOP_PAD_", "MMAP_THRESHOLD_", "MMAP_MAX_")  # after MALLOC_


@cache
def keep() -> None:
    """Keep freed memory from now on, unless the environment configures glibc's malloc or the
    C library is not glibc."""
    decided = any(f"MALLOC_{name}" in os.environ for name in SETTINGS)
    if decided or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
