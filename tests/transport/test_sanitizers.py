"""The C++ that runs programs, under the sanitizers of threads, of addresses and of behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ringdp.schedule import fuse, project, schedule

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "g++")


def compiled(sanitizer: str, at: Path) -> Path:
    if not shutil.which(CXX):
        pytest.skip(f"no {CXX}")
    program = at / "ranks_in_threads"
    command = [CXX, "-std=c++17", "-O1", "-g", "-pthread", "-DRINGDP_CLONES=", "-Wno-psabi"]
    command += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-I", "csrc"]
    built = subprocess.run(
        [*command, str(HERE / "ranks_in_threads.cpp"), "-o", str(program)],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"no library for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_race_and_no_stray_access(tmp_path, sanitizer):
    program = compiled(sanitizer, tmp_path)
    cases = (("all_reduce", "ring"), ("all_reduce", "direct"), ("broadcast", "ring"))
    for collective, algorithm in cases:
        files = []
        for r in range(3):
            p = fuse(project(schedule(collective, algorithm, 3), r))
            rows = "\n".join(" ".join(map(str, row)) for row in p.rows)
            files.append(tmp_path / f"{collective}-{algorithm}-{r}")
            files[-1].write_text(f"{p.chunks} {p.scratch} {len(p.rows)}\n{rows}\n")
        command = [str(program), collective, *map(str, files)]
        # -R: a fixed layout, without which older sanitizers of threads stop at once
        fixed = ["setarch", "-R"] if shutil.which("setarch") else []
        done = subprocess.run([*fixed, *command], capture_output=True, text=True, timeout=60)
        if "personality" in done.stderr:  # a container may forbid it
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("this kernel's address layout is not for this sanitizer")
        assert done.returncode == 0, done.stderr
