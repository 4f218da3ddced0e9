"""Programs of C++ that a bench compiles when it begins."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def compiled(source: str, *flags: str) -> Iterator[Callable[..., str]]:
    """Runs the program of a file of this directory with arguments, and returns what it says.

    Raises CalledProcessError where there is no compiler of C++.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    with tempfile.TemporaryDirectory() as directory:
        program, file = Path(directory) / "program", Path(__file__).with_name(source)
        subprocess.run([compiler, "-O3", *flags, file, "-o", program], check=True)

        def run(*arguments: object) -> str:
            command = [program, *map(str, arguments)]
            return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout

        yield run
