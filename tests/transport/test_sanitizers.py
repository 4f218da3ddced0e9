"""The C++ that runs programs, under the sanitizers of threads, of addresses and of behaviour."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ringdp.schedule import fuse, project, schedule
from tests.builds import Build, Builds

pytestmark = pytest.mark.process

SECONDS = 600  # only a hang reaches it

PUSH = "cursors_.head.store(head(std::memory_order_relaxed) + 1, std::memory_order_release)"
POP = "cursors_.tail.store(tail(std::memory_order_relaxed) + 1, std::memory_order_release)"
FILLED = (  # the stores that say that something is there
    ("fifo.hpp", PUSH),
    ("direct.hpp", "laid.store(tile + 1, std::memory_order_release)"),
)
FREED = (  # and that its place is free again
    ("fifo.hpp", POP),
    ("direct.hpp", "taken.store(tiles_ + t + 1, std::memory_order_release)"),
)


def sanitized(sanitizer: str, relaxed: tuple[tuple[str, str], ...] = ()) -> Build:
    options = ("-O1", "-g1", "-DRINGDP_CLONES=", "-fno-sanitize-recover=all")
    return Build("transport/ranks_in_threads.cpp", (*options, f"-fsanitize={sanitizer}"), relaxed)


BUILDS = {
    "thread": sanitized("thread"),
    "address": sanitized("address,undefined"),
    "filled": sanitized("thread", FILLED),
    "freed": sanitized("thread", FREED),
}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # -R: a fixed layout, without which older sanitizers of threads stop at once
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run(
        [*fixed, *command], capture_output=True, encoding="utf-8", timeout=SECONDS
    )
    if "personality" in done.stderr:  # a container may forbid it
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=SECONDS)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is not for this sanitizer")
    return done


def programs(collective: str, algorithm: str, at: Path) -> list[str]:
    files = []
    for r in range(3):
        p = fuse(project(schedule(collective, algorithm, 3), r))
        rows = "\n".join(" ".join(map(str, row)) for row in p.rows)
        files.append(at / f"{collective}-{algorithm}-{r}")
        files[-1].write_text(f"{p.chunks} {p.scratch} {len(p.rows)}\n{rows}\n", encoding="utf-8")
    return [collective, *map(str, files)]


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_no_race_and_no_stray_access(tmp_path: Path, builds: Builds, sanitizer: str) -> None:
    program = str(builds[BUILDS[sanitizer]])
    for collective, algorithm in (
        ("all_reduce", "ring"),
        ("all_reduce", "direct"),
        ("broadcast", "ring"),
    ):
        done = run([program, *programs(collective, algorithm, tmp_path)])
        assert done.returncode == 0, done.stderr
    for what in "direct", "messages":
        for n in "1", "2", "3":
            done = run([program, what, n])
            assert done.returncode == 0, done.stderr
    done = run([program, "bells"])  # it would sleep for an hour
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("relaxed", ["filled", "freed"])
def test_a_release_made_relaxed_is_a_race(tmp_path: Path, builds: Builds, relaxed: str) -> None:
    """Else the test above shows nothing."""
    program = str(builds[BUILDS[relaxed]])
    for arguments in (programs("broadcast", "ring", tmp_path), ["direct", "2"], ["messages", "2"]):
        done = run([program, *arguments])
        assert done.returncode != 0
        assert "ThreadSanitizer: data race" in done.stderr
