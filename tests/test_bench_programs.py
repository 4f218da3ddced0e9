"""The C++ programs of benches compile: they include csrc's headers, and run only in a bench."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bench.program import FLAGS
from tests.builds import CXX

PROGRAMS = sorted((Path(__file__).parents[1] / "bench").glob("*.cpp"))


@pytest.mark.skipif(not shutil.which(CXX), reason=f"no {CXX}")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_it_compiles(program: Path) -> None:
    command = [CXX, *FLAGS, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", program]
    made = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert made.returncode == 0, made.stderr
