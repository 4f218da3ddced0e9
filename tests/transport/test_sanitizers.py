"""The C++ that runs programs, under the sanitizers of threads, of addresses and of behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from ringdp.schedule import fuse, project, schedule

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "g++")
SECONDS = 240  # only a hang reaches it

HEAD = "c.head.store(head + 1, std::memory_order_release)"
RELEASES = (  # the store that publishes, and what runs over it
    ("interpreter.hpp", HEAD),
    ("direct.hpp", "laid.store(tile + 1, std::memory_order_release)"),
    ("channels.hpp", HEAD),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Path]]:
    """The program by sanitizer, and as "relaxed" for that of threads without the releases. A
    compiler takes seconds of one core, so all run at once."""
    at = tmp_path_factory.mktemp("built")
    with ThreadPoolExecutor() as pool:
        return {
            "thread": pool.submit(compiled, "thread", at / "thread"),
            "address,undefined": pool.submit(compiled, "address,undefined", at / "address"),
            "relaxed": pool.submit(compiled, "thread", at / "relaxed", relaxed(at / "csrc")),
        }


def relaxed(sources: Path) -> str:
    """A copy of the sources whose releases are none."""
    shutil.copytree(HERE.parents[1] / "csrc", sources)
    for file, store in RELEASES:
        text = (sources / file).read_text()
        assert text.count(store) == 1
        (sources / file).write_text(text.replace(store, store.replace("release", "relaxed")))
    return str(sources)


def compiled(sanitizer: str, program: Path, sources: str = "csrc") -> Path:
    if not shutil.which(CXX):
        pytest.skip(f"no {CXX}")
    command = [CXX, "-std=c++17", "-O1", "-g1", "-pthread", "-DRINGDP_CLONES=", "-Wno-psabi"]
    command += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-I", sources]
    built = subprocess.run(
        [*command, str(HERE / "ranks_in_threads.cpp"), "-o", str(program)],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"no library for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    return program


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # -R: a fixed layout, without which older sanitizers of threads stop at once
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run([*fixed, *command], capture_output=True, text=True, timeout=SECONDS)
    if "personality" in done.stderr:  # a container may forbid it
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address layout is not for this sanitizer")
    return done


def programs(collective: str, algorithm: str, at: Path) -> list[str]:
    files = []
    for r in range(3):
        p = fuse(project(schedule(collective, algorithm, 3), r))
        rows = "\n".join(" ".join(map(str, row)) for row in p.rows)
        files.append(at / f"{collective}-{algorithm}-{r}")
        files[-1].write_text(f"{p.chunks} {p.scratch} {len(p.rows)}\n{rows}\n")
    return [collective, *map(str, files)]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_race_and_no_stray_access(tmp_path, built, sanitizer):
    program = str(built[sanitizer].result())
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


def test_a_release_made_relaxed_is_a_race(tmp_path, built):
    """Else the test above shows nothing."""
    program = str(built["relaxed"].result())
    for arguments in (programs("all_reduce", "ring", tmp_path), ["direct", "2"], ["messages", "2"]):
        done = run([program, *arguments])
        assert done.returncode != 0
        assert "ThreadSanitizer: data race" in done.stderr
