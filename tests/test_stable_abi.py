"""The extension uses only Python's stable ABI, which it is built for from Python 3.12 on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CXX = os.environ.get("CXX", "g++")


def headers() -> Iterator[Path]:
    """The include directories of this Python, the system's and a version manager's."""
    yield Path(sysconfig.get_path("include"))
    for folder in ("/usr/include", "/usr/local/include"):
        yield from Path(folder).glob("python3.*")
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    yield from versions.glob("*/include/python3.*")


def minor(include: Path) -> int:
    named = re.fullmatch(r"python3\.(\d+)", include.name)  # excludes builds without the GIL
    return int(named[1]) if named and (include / "Python.h").exists() else 0


@pytest.mark.skipif(not shutil.which(CXX), reason=f"no {CXX}")
def test_the_extension_compiles_with_the_limited_api():
    nanobind = pytest.importorskip("nanobind")
    newest = max(headers(), key=minor)
    if minor(newest) < 12:
        pytest.skip("no headers of Python 3.12 or newer")
    command = [CXX, "-std=c++17", "-fsyntax-only", "-DPy_LIMITED_API=0x030c0000"]
    command += [f"-I{newest}", f"-I{nanobind.include_dir()}", str(ROOT / "csrc" / "module.cpp")]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr
