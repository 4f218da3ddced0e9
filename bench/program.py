"""Compiles the C++ programs of benches."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-pthread")  # as csrc, whose headers they include


@contextmanager
def compiled(source: str) -> Iterator[Callable[..., str]]:
    """Compile a file of this directory; yield a function that runs it and returns its output.

    Raises CalledProcessError if compiling fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    with tempfile.TemporaryDirectory() as directory:
        program, file = Path(directory) / "program", Path(__file__).with_name(source)
        subprocess.run([compiler, *FLAGS, file, "-o", program], check=True)

        def run(*arguments: object) -> str:
            command = [program, *map(str, arguments)]
            return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout

        yield run
