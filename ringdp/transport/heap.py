"""What a training step frees is kept by its process, for the next step.

glibc hands free memory at the heap's end back to the system, from where it comes again as a page
fault for each 4 KiB: up to 25,000 of them in a step of a GPT of 13.8M parameters, a tenth of its
time. How many is luck: of what happens to lie at the heap's end. torch's CUDA allocator keeps what
is freed as well.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
KEPT = 2**31 - 1  # bytes at the heap's end: as many as fit mallopt's int
SET = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
LARGEST = (
    32 << 20
)  # bytes of what comes from the heap: as many as glibc allows, and comes to itself


@cache
def keep() -> bool:
    """Whether it does; not where the environment says what glibc is to do, or there is no glibc."""
    if SET & os.environ.keys():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(option, value)
        for option, value in ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, KEPT))
    )
