"""`make gpu`: all tests and benches that need a GPU, in less than ten minutes.

    python -m bench.gpu [--seconds S] [--copy DIR]   tests and benches
    python -m bench.gpu peer F      one part: times the kernels over peer memory, into F

Parts without rank processes come first: they are fast, and leave no process on the GPU that could
hinder others. Each part has a time limit, so one that hangs costs only its own time and what
earlier parts left over. All parts end within S seconds of the start of this process.
After every part the results so far are written to bench/results/<gpu>.json, and the output is in
build/gpu.log; both are also copied to DIR. A part counts as skipped, with reasons, if all of its
tests were skipped or if a part that it needs did not pass. Exit code: 0 if all parts passed, 1 if
one did not, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median

import torch

from bench import BEGUN
from bench.overlay import SECONDS
from bench.part import GRACE, ROOT, Outcome, Part, run
from bench.results import RESULTS
from bench.virtual import VirtualRanks
from ringdp.cli.bench.cases import CASES
from ringdp.cli.bench.kernels import LAUNCH_CYCLES
from ringdp.cli.exits import exit_code
from ringdp.cli.files import write_json
from ringdp.cli.launch import signals_raised
from ringdp.schedule import fuse, project, schedule
from ringdp.transport.peer.kernels import Launch, kernels_on

LEAST = 10.0  # s: a part is not begun with less time left
START = 10.0  # s, at most, until pytest has imported torch and starts the first test
LOG = ROOT / "build" / "gpu.log"
# Kernels compile for each dtype and alignment, and NCCL takes time for each communicator: both are
# faster in several processes.
SIDE_BY_SIDE = ("-n", "8") if find_spec("xdist") else ()
FEW_THREADS = ("env", "OMP_NUM_THREADS=2")  # per process
OPTIONS = ("-vv", "-rs", "--tb=short", "--durations=5", "-m", "gpu")
PYTEST = (*FEW_THREADS, sys.executable, "-m", "pytest", *OPTIONS)
MAIN = (sys.executable, "-m", "ringdp")
PEER_BYTES = (1 << 20, 16 << 20, 64 << 20)  # of a rank's buffer
ROUNDS = 8  # the first two warm up; sums on 8 ranks reach 8^8, which is exact in float32
PACKAGES = ("ringdp", "torch", "triton", "numpy", "cupy-cuda12x", "cupy-cuda13x")


def pytested(name: str, limit: float, *where: str, needs: str = "") -> Part:
    # A test that hangs says where, and ends its part, before the part is killed.
    hangs = f"faulthandler_timeout={limit - START:.0f}"
    command = (*PYTEST, "-o", hangs, "--maxfail=25", "--junitxml", "{out}", *where)
    return Part(name, command, limit, tests=True, needs=needs)


def benched(name: str, limit: float, least: str, most: str, *what: str, needs: str = "") -> Part:
    command = (*MAIN, "bench", *what, "--min", least, "--max", most, "--json", "{out}")
    return Part(name, command, limit, tests=False, needs=needs)


OVER_NCCL = ("all_reduce", "--transport", "nccl", "--rounds", "2", "--factor", "16")
MEETING = "two processes meet over NCCL"  # on one GPU, as if on two hosts

PARTS = (
    Part("what is here", (*MAIN, "doctor"), 15, tests=False),
    pytested("kernels equal the CPU's bits", 60, *SIDE_BY_SIDE, "tests/kernels"),
    benched("bench of kernels", 45, "4K", "256M", "kernels", "--factor", "4"),
    pytested("NCCL with virtual ranks", 30, *SIDE_BY_SIDE, "tests/transport/nccl/test_virtual.py"),
    pytested("the engine, on one rank", 40, *SIDE_BY_SIDE, "tests/transport/nccl/test_alone.py"),
    pytested("peer memory equals the simulator", 40, "tests/transport/test_peer.py"),
    Part("bench of peer memory", (sys.executable, "-m", "bench.gpu", "peer", "{out}"), 20, False),
    # From here on two processes take turns on the GPU, each for milliseconds while it waits for the
    # other.
    pytested(MEETING, 45, "tests/transport/nccl/test_meeting.py"),
    pytested("NCCL with processes", 60, "tests/transport/nccl/test_gpu.py", needs=MEETING),
    Part(
        "a GPT over NCCL",
        (*MAIN, "train", "--transport", "nccl", "--steps", "5", "--no-sample", "--json", "{out}"),
        *(30, False, MEETING),
    ),
    pytested("processes over peer memory", 35, "tests/transport/test_peer_gpu.py"),
    benched(
        "bench of NCCL: our schedules beside its own",
        *(30, "64K", "16M"),
        *(*OVER_NCCL, "--algorithm", "ring,direct,nccl"),
        needs=MEETING,
    ),
    benched(
        "bench of NCCL: ours beside torch's",
        *(20, "64K", "1M"),
        *(*OVER_NCCL, "--peer", "torch-nccl"),
        needs=MEETING,
    ),
)


class Timed:
    """Launches kernels over peer memory, and times the last launch on the GPU."""

    def __init__(self) -> None:
        self._kernels = kernels_on(torch.device("cuda"))

    def launch(self, launch: Launch) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LAUNCH_CYCLES)  # keeps the GPU busy, so that the launch is not timed too
        self._begin.record()
        self._kernels.launch(launch)
        self._end.record()

    @property
    def seconds(self) -> float:
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


def peer(file: Path) -> None:
    """Time virtual ranks on one GPU. All bytes stay in its memory, so no link is measured."""
    rows, kernels = list[dict[str, object]](), Timed()
    for n, algorithm, size in product((2, 4, 8), ("ring", "direct"), PEER_BYTES):
        row = {"ranks": n, "algorithm": algorithm, "bytes": size}
        try:
            rows.append(row | _timed(n, algorithm, size, kernels))
        except Exception as e:  # keep the other rows
            rows.append(row | {"error": f"{type(e).__name__}: {e}"})
        write_json(file, rows)  # the next may hang
    if bad := [row for row in rows if row.get("wrong") or "error" in row]:
        sys.exit("\n".join(["wrong elements, or an error:", *map(json.dumps, bad)]))


def _timed(n: int, algorithm: str, size: int, kernels: Timed) -> dict[str, object]:
    made = schedule("all_reduce", algorithm, n)
    programs = [fuse(project(made, rank)) for rank in range(n)]
    ranks = VirtualRanks(n, kernels=kernels)
    buffers = [torch.ones(size // 4, device="cuda") for _ in range(n)]
    seconds = []
    for _ in range(ROUNDS):
        ranks.run(programs, buffers)
        seconds.append(kernels.seconds)
    p50 = median(seconds[2:])
    return {
        "p50_us": round(p50 * 1e6, 1),
        "min_us": round(min(seconds) * 1e6, 1),
        "busbw": round(size / p50 * CASES["all_reduce"].bus(n) / 1e9, 2),
        "wrong": sum(int((x != n**ROUNDS).sum()) for x in buffers),
    }


def result_file(gpu: str) -> Path:
    return RESULTS / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


@signals_raised()
def main(parts: Sequence[Part] = PARTS, seconds: float = SECONDS, copy: Path | None = None) -> int:
    if not torch.cuda.is_available():
        print(
            f"make gpu needs a CUDA GPU, and torch {torch.__version__} finds none here: nothing "
            "was tested or measured. Run it where nvidia-smi lists one, with torch for CUDA.",
            file=sys.stderr,
        )
        return 2
    until = time.monotonic() + seconds
    gpu = torch.cuda.get_device_name()
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("", encoding="utf-8")
    outcomes = [Outcome(part.name, "not begun") for part in parts]
    for at, part in enumerate(parts):
        left = until - time.monotonic()
        spare = left - GRACE - sum(p.limit for p in parts[at:])  # what earlier parts did not use
        limit = min(left, part.limit + max(0.0, spare))
        lacks = [o for o in outcomes[:at] if o.name == part.needs and o.state != "passed"]
        if lacks:
            outcomes[at].state = "skipped"
            outcomes[at].reasons = [f"{o.name}: {o.state}" for o in lacks]
        elif limit >= min(LEAST, part.limit):
            print(f"{part.name} (at most {limit:.0f} s)", flush=True)
            outcomes[at] = run(part, limit, LOG)
        print(_says(outcomes[at]), flush=True)
        write(gpu, outcomes, copy)
    print(f"written: {result_file(gpu)}, and {LOG}")
    for outcome in outcomes:
        print(f"{outcome.state:>10}  {outcome.name}")
    return 0 if all(o.state == "passed" for o in outcomes) else 1


def write(gpu: str, outcomes: Sequence[Outcome], copy: Path | None) -> None:
    write_json(result_file(gpu), {"gpu": gpu, "versions": versions(), "parts": outcomes})
    if copy is not None:
        copy.mkdir(parents=True, exist_ok=True)
        for file in (result_file(gpu), LOG):
            with suppress(shutil.SameFileError):  # the folder of the results itself
                shutil.copy(file, copy)


def versions() -> dict[str, str]:
    found = {"cuda": str(torch.version.cuda)}
    if torch.version.cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in PACKAGES:
        if any(metadata.distributions(name=package)):
            found[package] = metadata.version(package)
    return found


def _says(found: Outcome) -> str:
    lines = [f"  {found.state} in {found.seconds} s: {found.name}"]
    if found.passed or found.skipped:
        lines[0] += f": {found.passed} tests passed, {found.skipped} skipped"
    lines += [f"  skipped: {reason}" for reason in found.reasons]
    return "\n".join([*lines, found.tail] if found.tail else lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        peer(Path(sys.argv[2]))
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--seconds", type=float, default=SECONDS)
        parser.add_argument(
            "--copy",
            type=Path,
            metavar="DIR",
            help="also copy results and log there after every part",
        )
        args = parser.parse_args()
        left = args.seconds - (time.monotonic() - BEGUN)
        sys.exit(exit_code(lambda: main(seconds=left, copy=args.copy)))
