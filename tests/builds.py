"""C++ programs of the tests.

Compiling one takes seconds. So the builds that the selected test files name in their BUILDS start
in the background at the beginning of the session, at low priority. The workers of pytest-xdist make
each only once.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
CXX = os.environ.get("CXX", "g++")
SECONDS = 1800  # only a hang takes as long, or a very busy machine


# A store with release order, and the name of the variable that it stores to.
RELEASE = re.compile(
    r"(?:\S*\b(\w+)\.store\(|__atomic_store_n\((\w+),).*(?:memory_order_release|__ATOMIC_RELEASE)\)"
)


class Build(NamedTuple):
    """A program. With `relaxes`, setting RELAXED_NAME in a run's environment turns csrc's release
    stores to the variable NAME into relaxed ones, so a test can show that the order is needed."""

    source: str  # relative to tests/
    options: tuple[str, ...]
    relaxes: bool = False


class Builds:
    """builds[build]: the program's path; skips the test if it cannot be compiled here."""

    def __init__(self, at: Path) -> None:
        at.mkdir(exist_ok=True)
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

    def wait(self) -> None:
        """Wait until no compiler runs any more."""
        wait(self._made.values())

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for compiler in self._compilers:
            if compiler.poll() is None:
                os.killpg(
                    compiler.pid, signal.SIGTERM
                )  # a driver, and the compiler that it started
        self._pool.shutdown()

    def _make(self, build: Build, out: Path) -> Path:
        with out.with_suffix(".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():  # no other worker has made it
                self._compile(build, out)
        return out

    def _compile(self, build: Build, out: Path) -> None:
        csrc, options = ROOT / "csrc", build.options
        if build.relaxes:
            options = (*options, "-include", "cstdlib")  # for std::getenv
            csrc = shutil.copytree(csrc, out.with_suffix(".csrc"), dirs_exist_ok=True)
            for header in csrc.rglob("*.hpp"):
                text = header.read_text(encoding="utf-8")
                header.write_text(RELEASE.sub(_release_or_relaxed, text), encoding="utf-8")
        command = ["nice", "-n", "5", CXX, "-std=c++17", "-pthread", "-Wno-psabi", *options]
        command += ["-I", str(csrc), str(ROOT / "tests" / build.source), "-o", str(out)]
        compiler = subprocess.Popen(
            command, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True
        )
        self._compilers.append(compiler)
        _, errors = compiler.communicate(timeout=SECONDS)
        if "cannot find" in errors and "san" in errors:
            pytest.skip(f"no library for a sanitizer: {errors}")
        assert compiler.returncode == 0, errors


def _release_or_relaxed(release: re.Match[str]) -> str:
    store, name = release[0], release[1] or release[2]
    relaxed = store.replace("release", "relaxed").replace("RELEASE", "RELAXED")
    return f'std::getenv("RELAXED_{name}") ? {relaxed} : {store}'
