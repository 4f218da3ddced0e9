"""The C++ that runs programs, under the sanitizers of threads, of addresses and of behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from ringdp.schedule import fuse, project, schedule
from tests.builds import Build, Builds

pytestmark = pytest.mark.process

SECONDS = 600  # only a hang reaches it

# What is stored with release, and calls in which a race shows where it is not.
RELEASES = {
    "head": ("broadcast", "messages"),
    "tail": ("broadcast", "messages"),
    **dict.fromkeys(("laid", "taken", "collected", "flag", "count"), ("direct",)),
    **dict.fromkeys(("head_", "tail_"), ("tapes",)),
}
# -fno-builtin: short copies are calls, too, of which alone GCC's sanitizer of threads sees.
OPTIONS = ("-O1", "-g1", "-DRINGDP_CLONES=", "-fno-builtin", "-fno-sanitize-recover=all")
SOURCE = "transport/ranks_in_threads.cpp"
BUILDS = {
    "thread": Build(SOURCE, (*OPTIONS, "-fsanitize=thread"), relaxes=True),
    # -Og finds the same, and takes 9 s of a core to compile, where -O1 takes 15.
    "address": Build(SOURCE, (*OPTIONS, "-Og", "-fsanitize=address,undefined")),
}


def run(command: list[str], relaxed: str = "") -> subprocess.CompletedProcess[str]:
    """`relaxed`: see `Build`."""
    env = {**os.environ, f"RELAXED_{relaxed}": "", "TSAN_OPTIONS": "halt_on_error=1"}
    start = partial(subprocess.run, capture_output=True, encoding="utf-8", timeout=SECONDS, env=env)
    # -R: a fixed layout, without which older sanitizers of threads stop at once
    done = start(["setarch", "-R", *command] if shutil.which("setarch") else command)
    if "personality" in done.stderr:  # a container may forbid it
        done = start(command)
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
    for what in "bells", "tapes":  # a bell that is not heard would let it sleep for an hour
        done = run([program, what])
        assert done.returncode == 0, done.stderr


def racing(program: Path, relaxed: str, arguments: list[str]) -> bool:
    done = run([str(program), *arguments], relaxed)
    return done.returncode != 0 and "ThreadSanitizer: data race" in done.stderr


@pytest.mark.parametrize("relaxed", RELEASES)
def test_a_release_made_relaxed_is_a_race(tmp_path: Path, builds: Builds, relaxed: str) -> None:
    """Else the test above shows nothing."""
    for what in RELEASES[relaxed]:
        broadcast = what == "broadcast"
        arguments = programs("broadcast", "ring", tmp_path) if broadcast else [what, "2"]
        assert racing(builds[BUILDS["thread"]], relaxed, arguments), what
