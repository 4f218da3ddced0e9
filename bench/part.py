"""Runs one part of a long command within a time limit, and records the outcome.

A part that exceeds its limit is interrupted, so that tests report how far they came. After GRACE
seconds, or when the part ends, every process that it has started is killed, in any session: this
process is their subreaper, so orphans become its children.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from ringdp.cli.doctor.job import parents

ROOT = Path(__file__).parent.parent
TAIL = 6000  # characters kept of a part's output
GRACE = 5.0  # s
SETTINGS = {
    "NCCL_DEBUG": "WARN",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    # torch's store looks up the names of clients: 10 s each if the name server is out of reach
    "RES_OPTIONS": "timeout:1 attempts:1",
}
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple[str, ...]  # {out} becomes the file to write: JUnit's XML, or rows as JSON
    limit: float  # s
    tests: bool
    needs: str = ""  # another part, which must have passed


@dataclass
class Outcome:
    name: str
    state: str  # "passed", "failed", "skipped", "timed out" or "not begun"
    seconds: float = 0.0
    passed: int = 0  # tests
    skipped: int = 0
    rows: object = None  # of a bench
    tail: str = ""  # end of the output, unless it passed
    reasons: list[str] = field(default_factory=list)  # why tests, or the whole part, were skipped


def run(part: Part, limit: float, log: Path) -> Outcome:
    """Run a part; append its output to `log`."""
    begun, others = time.monotonic(), _children()
    _become_subreaper()
    with (
        tempfile.TemporaryDirectory() as folder,
        # a process killed while it writes leaves half of a character
        log.open("a+", encoding="utf-8", errors="replace") as printed,
    ):
        out = Path(folder) / "out"
        command = [word.replace("{out}", str(out)) for word in part.command]
        print(f"\n==== {part.name}: {' '.join(command)}", file=printed, flush=True)
        start = printed.tell()
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=SETTINGS | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            state = "passed" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "timed out"
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:  # also if this process is asked to end
            _kill_children(others)
        printed.seek(start)
        text = printed.read()
        found = Outcome(part.name, state, round(time.monotonic() - begun, 1), tail=text[-TAIL:])
        if part.tests:
            _count(found, out, text)
        elif out.exists():
            with suppress(ValueError):  # a killed process may have written half
                found.rows = json.loads(out.read_bytes())
    if found.state == "passed":
        found.tail = ""
    return found


def _count(found: Outcome, out: Path, text: str) -> None:
    """Count tests from JUnit's XML, or from the lines of `pytest -vv` if pytest was killed."""
    failed = len(re.findall(r"\b(?:FAILED|ERROR)\b", text))
    found.passed, found.skipped = len(re.findall(r" PASSED\b", text)), 0
    with suppress(OSError, ElementTree.ParseError):
        suite = ElementTree.parse(out).getroot().find("testsuite")
        assert suite is not None
        number = {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
        failed, found.skipped = number["failures"] + number["errors"], number["skipped"]
        found.passed = number["tests"] - found.skipped - failed
        found.reasons = sorted({s.get("message", "") for s in suite.iter("skipped")})
    if found.state == "passed" and found.passed == 0 and not failed:
        found.state = "skipped"


def _become_subreaper() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_children(others: set[int]) -> None:
    """Kill all children but `others`, repeatedly: a killed child's children become ours.

    A process that a GPU's driver does not let die is left behind.
    """
    until = time.monotonic() + GRACE
    while (children := _children() - others) and time.monotonic() < until:
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _children() -> set[int]:
    """The children of this process."""
    return {pid for pid, parent in parents() if parent == os.getpid()}
