"""Resource limits of this process: address space and file descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def address_space_limit(more: int) -> Iterator[None]:
    """Limits the address space to `more` bytes beyond what is mapped now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Makes the next attempt to open a file descriptor fail."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest free one
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
