"""Creating a communicator makes malloc keep freed memory, unless the environment configures
malloc."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.scripts import run

pytestmark = pytest.mark.process

# Prints the page faults of a loop that allocates and frees 64 MiB, without and with a communicator.
STEPS = """
import ctypes, os, resource, ringdp
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
blocks = [0] * 64
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def of_a_step():
    for _ in range(3):
        before = faults()
        for i in range(64):
            blocks[i] = libc.malloc(1 << 20)
            libc.memset(blocks[i], 1, 1 << 20)
        for block in blocks:
            libc.free(block)
    return faults() - before
first = of_a_step()
os.environ |= {environment}
comm = ringdp.init()
print(first, of_a_step())
"""
DECIDES = re.compile("MALLOC_|GLIBC_TUNABLES|LD_PRELOAD")
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def faults(folder: Path, **environment: str) -> list[int]:
    script = folder / "steps.py"
    script.write_text(STEPS.format(environment=environment), encoding="utf-8")
    (printed,) = run(script, ranks=0)
    return [int(n) for n in printed.split()]


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="glibc's malloc")
@pytest.mark.skipif(any(map(DECIDES.match, os.environ)), reason="malloc is configured")
@pytest.mark.skipif(
    HUGE.exists() and "[always]" in HUGE.read_text(encoding="utf-8"), reason="pages are huge"
)
def test_freed_memory_is_kept_once_there_is_a_communicator(tmp_path: Path):
    before, after = faults(tmp_path)
    assert before > 500  # one for each page, of up to 64 KiB
    assert after < before / 10
    before, after = faults(tmp_path, MALLOC_TRIM_THRESHOLD_="131072")
    assert after > 500
