"""What a training step frees is kept by its process, for the next step.

glibc hands free memory at the heap's end back to the system, from where it comes again as a page
fault for each 4 KiB. How many a step has is luck, of what happens to lie at the heap's end; what
they take, `python -m bench.ddp_step` shows. torch's CUDA allocator keeps what is freed as well.

Blocks from 32 MiB on come from the system each time, and go back, whatever is asked; and when 2 GiB
are free at the heap's end, all of that goes. `malloc_trim(0)` of glibc gives back what is kept.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
AT_THE_END = 2**31 - 1  # bytes: as many as mallopt's int holds
LARGEST = 32 << 20  # bytes of a block: as many as glibc comes to by itself, and allows
SETTINGS = ("TRIM_THRESHOLD_", "TOP_PAD_", "MMAP_THRESHOLD_", "MMAP_MAX_")  # after MALLOC_


@cache
def keep() -> None:
    """From now on; not where the environment tells glibc's malloc what to do, or there is none."""
    decided = any(f"MALLOC_{name}" in os.environ for name in SETTINGS)
    if decided or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST)
        mallopt(M_TRIM_THRESHOLD, AT_THE_END)
