"""Builds ringdp over another environment's packages, for machines without network: `make gpu`.

    PYTHON -m bench.overlay [--copy DIR]

builds ringdp into build/overlay with the packages that PYTHON has installed, then runs `bench.gpu`
there, with the same DIR. pip installs ringdp alone and uses no index, so a missing package is an
error that names it. PYTHON's own environment stays unchanged.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bench import BEGUN

ROOT = Path(__file__).parent.parent
HERE = ROOT / "build" / "overlay"
# s from this process's start to the end of the last part: some machines allow only 600 s.
SECONDS = 520.0
BUILD_SECONDS = 240.0
BUILD = ("pip", "scikit-build-core", "nanobind", "cmake", "ninja")
RUN = ("torch", "numpy", "typer", "rich", "safetensors", "pytest", "hypothesis")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copy", metavar="DIR", help="as that of bench.gpu")
    args = parser.parse_args(arguments)
    if missing := [name for name in BUILD + RUN if not any(metadata.distributions(name=name))]:
        print(f"{sys.executable} has no {', '.join(missing)}: install them there", file=sys.stderr)
        return 1
    python = make(HERE)
    print(f"building ringdp over {sys.prefix}, in {HERE}", flush=True)
    code, said = limited(install(python), BUILD_SECONDS)
    if code != 0 or "left out" in said:  # the kernels for peer memory; nvcc says why
        print(said, file=sys.stderr)
    if code == 0:
        taken = time.monotonic() - BEGUN
        print(f"built in {taken:.0f} s", flush=True)
        copy = ["--copy", args.copy] if args.copy else []
        os.execv(python, [python, "-m", "bench.gpu", "--seconds", str(SECONDS - taken), *copy])
    return code


def limited(command: list[str], seconds: float) -> tuple[int, str]:
    """Exit code and output of a command. After `seconds` it is killed with all that it started."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",  # a process killed while it writes leaves half of a character
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return 1, f"{said}\n{' '.join(command)} took more than {seconds:g} s and was ended"
    return process.returncode, said


def make(at: Path) -> str:
    """Make a virtual environment that also sees this one's packages; return its Python."""
    venv.create(at, symlinks=True)
    own = sysconfig.get_path("purelib", "venv", vars={"base": str(at), "platbase": str(at)})
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in others]
    first = Path(own) / "00_below.pth"  # sorts first, so that this ringdp wins
    first.write_text("".join(lines), encoding="utf-8")
    return str(at / "bin" / "python")


def install(python: str) -> list[str]:
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    return [python, "-m", "pip", "-v", "install", *options, "-e", "."]


if __name__ == "__main__":
    sys.exit(main())
