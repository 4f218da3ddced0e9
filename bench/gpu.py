"""Everything that needs a GPU, in one command of less than ten minutes: `make gpu`.

    python -m bench.gpu          tests, then benches, into bench/results/<gpu>.json
    python -m bench.gpu peer F   one part: times the kernels over peer memory, into F

Every part is a process with a limit of its own, so one that hangs costs its own time only. A part
whose tests were all skipped counts as not run, and says why. Exit code: 0 if all parts passed, 1 if
one did not, 2 if there is no GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import torch

from bench.required import RESULTS

ROOT = Path(__file__).parent.parent
PYTEST = (sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-rs", "-m", "gpu")
MAIN = (sys.executable, "-c", "import sys; from ringdp.cli.main import main; sys.exit(main())")
TAIL = 2000  # characters of a part's output that are kept
PEER_BYTES = (1 << 20, 16 << 20, 64 << 20)  # of a rank's buffer


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple[str, ...]  # {out}: the file it writes, JUnit's XML or rows as JSON
    limit: float  # s
    tests: bool


@dataclass
class Outcome:
    name: str
    state: str  # "passed", "failed", "skipped" or "timed out"
    seconds: float
    passed: int = 0  # tests
    skipped: int = 0
    rows: object = None  # of a bench
    tail: str = ""  # of what it printed, unless it passed
    reasons: list[str] = field(default_factory=list)  # for skipping tests


def tests(name: str, limit: float, *where: str) -> Part:
    return Part(name, (*PYTEST, "--junitxml", "{out}", *where), limit, tests=True)


PARTS = (
    tests("kernels equal the CPU's bits", 180, "tests/kernels"),
    tests("peer memory equals the simulator", 60, "tests/transport/test_peer.py"),
    tests(
        "all other GPU tests, NCCL among them",
        110,
        "tests",
        "--ignore=tests/kernels",
        "--ignore=tests/transport/test_peer.py",
    ),
    Part(
        "bench of kernels",
        (
            *MAIN,
            *("bench", "kernels"),
            *("--min", "256K", "--max", "256M", "--json", "{out}"),
        ),
        100,
        tests=False,
    ),
    Part(
        "bench of NCCL: our schedules beside its own collectives",
        (
            *MAIN,
            *("bench", "all_reduce", "--transport", "nccl", "--algorithm", "ring,direct,nccl"),
            *("--min", "64K", "--max", "64M", "--rounds", "4", "--json", "{out}"),
        ),
        90,
        tests=False,
    ),
    Part("bench of peer memory", (sys.executable, "-m", "bench.gpu", "peer", "{out}"), 50, False),
)


def run(part: Part) -> Outcome:
    """In a process of its own, which is killed at its limit."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [word.replace("{out}", str(out)) for word in part.command]
        with (Path(folder) / "log").open("w+") as log:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=part.limit
                ).returncode
                state = "passed" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                state = "timed out"
            log.seek(0)
            tail = log.read()[-TAIL:]
        found = Outcome(part.name, state, round(time.monotonic() - begun, 1), tail=tail)
        if out.exists():
            (_count if part.tests else _rows)(found, out)
    if found.state == "passed":
        found.tail = ""
    return found


def _count(found: Outcome, out: Path) -> None:
    suite = ElementTree.parse(out).getroot().find("testsuite")
    assert suite is not None
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    found.skipped = number["skipped"]
    found.passed = number["tests"] - number["skipped"] - number["failures"] - number["errors"]
    found.reasons = sorted({s.get("message", "") for s in suite.iter("skipped")})
    if found.passed == 0 and not number["failures"] + number["errors"]:
        found.state = "skipped"


def _rows(found: Outcome, out: Path) -> None:
    found.rows = json.loads(out.read_text())


def peer(file: Path) -> None:
    """Virtual ranks on one GPU: all bytes go through one memory, so this is no link's speed."""
    from ringdp.schedule import fuse, project, schedule
    from ringdp.transport.peer import VirtualRanks

    rows = []
    for n in (2, 4, 8):
        for algorithm in ("ring", "direct"):
            made = schedule("all_reduce", algorithm, n)
            programs = [fuse(project(made, rank)) for rank in range(n)]
            ranks = VirtualRanks(n)
            for size in PEER_BYTES:
                buffers = [torch.ones(size // 4, device="cuda") for _ in range(n)]
                seconds = []
                for _ in range(8):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    ranks.run(programs, buffers)  # waits for its end
                    seconds.append(time.perf_counter() - start)
                p50 = median(seconds[2:])
                rows.append(
                    {
                        "ranks": n,
                        "algorithm": algorithm,
                        "bytes": size,
                        "p50_us": round(p50 * 1e6, 1),
                        "min_us": round(min(seconds) * 1e6, 1),
                        "busbw": round(size / p50 * 2 * (n - 1) / n / 1e9, 2),
                    }
                )
    file.write_text(json.dumps(rows))


def result_file(gpu: str) -> Path:
    return RESULTS / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def main(parts: Sequence[Part] = PARTS) -> int:
    if not torch.cuda.is_available():
        print(
            f"make gpu needs a CUDA GPU, and torch {torch.__version__} finds none here: nothing "
            "was tested or measured. Run it where nvidia-smi lists one, with torch for CUDA.",
            file=sys.stderr,
        )
        return 2
    gpu = torch.cuda.get_device_name()
    outcomes = []
    for part in parts:
        print(f"{part.name} (at most {part.limit:.0f} s)", flush=True)
        outcomes.append(run(part))
        print(_says(outcomes[-1]), flush=True)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    report = {"gpu": gpu, "versions": versions, "parts": [asdict(o) for o in outcomes]}
    result_file(gpu).write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {result_file(gpu)}")
    return 0 if all(o.state == "passed" for o in outcomes) else 1


def _says(found: Outcome) -> str:
    lines = [f"  {found.state} in {found.seconds} s"]
    if found.passed or found.skipped:
        lines[0] += f": {found.passed} tests passed, {found.skipped} skipped"
    lines += [f"  skipped: {reason}" for reason in found.reasons]
    return "\n".join([*lines, found.tail] if found.tail else lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        peer(Path(sys.argv[2]))
    else:
        sys.exit(main())
