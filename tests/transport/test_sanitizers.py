"""csrc's C++ under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from ringdp.schedule import Program, fuse, project, schedule
from tests.builds import Build, Builds

pytestmark = pytest.mark.process

SECONDS = 600  # only a hang takes as long

# Variable stored with release order -> the modes that race if it is relaxed.
RELEASES = {
    "head": ("broadcast", "messages"),
    "tail": ("broadcast", "messages"),
    **dict.fromkeys(("laid", "taken", "collected", "flag", "count"), ("direct",)),
    **dict.fromkeys(("head_", "tail_"), ("tapes",)),
}
# -fno-builtin: short copies become calls, which is all that GCC's ThreadSanitizer sees of them.
OPTIONS = ("-O1", "-g1", "-DRINGDP_CLONES=", "-fno-builtin", "-fno-sanitize-recover=all")
SOURCE = "transport/ranks_in_threads.cpp"
BUILDS = {
    "thread": Build(SOURCE, (*OPTIONS, "-fsanitize=thread"), relaxes=True),
    # -Og finds the same and compiles in 9 s, -O1 in 15.
    "address": Build(SOURCE, (*OPTIONS, "-Og", "-fsanitize=address,undefined")),
}


def run(command: list[str], relaxed: str = "") -> subprocess.CompletedProcess[str]:
    """`relaxed`: the variable whose stores are relaxed, see `Build`."""
    env = {**os.environ, f"RELAXED_{relaxed}": "", "TSAN_OPTIONS": "halt_on_error=1"}
    start = partial(subprocess.run, capture_output=True, encoding="utf-8", timeout=SECONDS, env=env)
    # -R: a fixed address layout, without which older ThreadSanitizers refuse to start
    done = start(["setarch", "-R", *command] if shutil.which("setarch") else command)
    if "personality" in done.stderr:  # a container may forbid it
        done = start(command)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is not for this sanitizer")
    return done


def write_programs(programs: list[Program], at: Path) -> list[str]:
    """Writes each rank's program to a file that the C++ test programs can read."""
    files = []
    for p in programs:
        rows = "\n".join(" ".join(map(str, row)) for row in p.rows)
        files.append(at / f"rank-{p.rank}")
        files[-1].write_text(f"{p.chunks} {p.scratch} {len(p.rows)}\n{rows}\n", encoding="utf-8")
    return list(map(str, files))


def arguments_of(collective: str, algorithm: str, at: Path) -> list[str]:
    plan = schedule(collective, algorithm, 3)
    return [collective, *write_programs([fuse(project(plan, r)) for r in range(3)], at)]


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_sanitizers_find_no_error(tmp_path: Path, builds: Builds, sanitizer: str) -> None:
    program = str(builds[BUILDS[sanitizer]])
    for collective, algorithm in (
        ("all_reduce", "ring"),
        ("all_reduce", "direct"),
        ("broadcast", "ring"),
    ):
        done = run([program, *arguments_of(collective, algorithm, tmp_path)])
        assert done.returncode == 0, done.stderr
    for what in "direct", "messages":
        for n in "1", "2", "3":
            done = run([program, what, n])
            assert done.returncode == 0, done.stderr
    for what in "bells", "tapes":  # a lost wake-up would sleep for an hour
        done = run([program, what])
        assert done.returncode == 0, done.stderr


def racing(program: Path, relaxed: str, arguments: list[str]) -> bool:
    done = run([str(program), *arguments], relaxed)
    return done.returncode != 0 and "ThreadSanitizer: data race" in done.stderr


@pytest.mark.parametrize("relaxed", RELEASES)
def test_thread_sanitizer_finds_every_relaxed_release(
    tmp_path: Path, builds: Builds, relaxed: str
) -> None:
    """Shows that the test above would find a race."""
    for what in RELEASES[relaxed]:
        broadcast = what == "broadcast"
        arguments = arguments_of("broadcast", "ring", tmp_path) if broadcast else [what, "2"]
        assert racing(builds[BUILDS["thread"]], relaxed, arguments), what
