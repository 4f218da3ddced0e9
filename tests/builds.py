"""C++ programs of tests.

A compiler takes seconds of a core, so those that the test files of a run name in their BUILDS are
begun as it begins, and made beside its other tests, of whatever time these leave.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
CXX = os.environ.get("CXX", "g++")
SECONDS = 1800  # only a hang reaches it, or a machine that others keep busy


class Build(NamedTuple):
    """`relaxed`: (file of csrc, its store that publishes), which is made to order nothing."""

    source: str  # in tests/
    options: tuple[str, ...]
    relaxed: tuple[tuple[str, str], ...] = ()


class Builds:
    """builds[build]: the program; skips the test where there is no compiler for it."""

    def __init__(self, at: Path) -> None:
        self._at, self._made = at, dict[Build, Future[Path]]()
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._compilers: list[subprocess.Popen[str]] = []

    def begin(self, builds: Mapping[str, Build]) -> None:
        for name, build in builds.items():
            self._made[build] = self._pool.submit(self._make, build, self._at / name)

    def __getitem__(self, build: Build) -> Path:
        if not shutil.which(CXX):
            pytest.skip(f"no {CXX}")
        return self._made[build].result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for compiler in self._compilers:
            compiler.kill()
        self._pool.shutdown()

    def _make(self, build: Build, out: Path) -> Path:
        csrc = ROOT / "csrc"
        if build.relaxed:
            csrc = out.with_suffix(".csrc")
            shutil.copytree(ROOT / "csrc", csrc)
        for file, store in build.relaxed:
            text = (csrc / file).read_text(encoding="utf-8")
            assert text.count(store) == 1
            relaxed = store.replace("release", "relaxed").replace("RELEASE", "RELAXED")
            (csrc / file).write_text(text.replace(store, relaxed), encoding="utf-8")
        command = ["nice", "-n", "5", CXX, "-std=c++17", "-pthread", "-Wno-psabi", *build.options]
        command += ["-I", str(csrc), str(ROOT / "tests" / build.source), "-o", str(out)]
        compiler = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8")
        self._compilers.append(compiler)
        _, said = compiler.communicate(timeout=SECONDS)
        if "cannot find" in said and "san" in said:
            pytest.skip(f"no library for a sanitizer: {said}")
        assert compiler.returncode == 0, said
        return out
