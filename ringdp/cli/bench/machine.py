"""Describes the machine, for files of results."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

CPU = Path("/sys/devices/system/cpu/cpu0/cache")


def describe(cores: int) -> dict[str, str]:
    """This machine and its present load; `cores` is the number that ranks are pinned to."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": str(cores),
        "caches": ", ".join(_caches()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "pages": f"{os.sysconf('SC_PAGE_SIZE')} bytes, huge ones {_huge()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": load(),
    }


def load() -> str:
    """The load averages of the last 1, 5 and 15 minutes."""
    return " ".join(f"{average:.2f}" for average in os.getloadavg())


def _field(file: Path, name: str) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return platform.machine()


def _caches() -> list[str]:
    found = []
    for index in sorted(CPU.glob("index*")):
        level, kind, size = (
            (index / f).read_text(encoding="utf-8").strip() for f in ("level", "type", "size")
        )
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return found


def _huge() -> str:
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not file.exists():
        return "unknown"
    return file.read_text(encoding="utf-8").split("[")[1].split("]")[0]
