"""`make gpu` without a GPU: its parts, their time limits and its report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bench import gpu, virtual
from bench import part as part_module
from bench.gpu import PYTEST, main
from bench.part import Outcome, Part, run
from ringdp.cli.bench.kernels import ALONE
from ringdp.cli.bench.options import Options
from ringdp.cli.launch import SignalError
from ringdp.errors import CollectiveTimeout
from ringdp.transport.peer import kernels
from tests.builds import Builds
from tests.transport import test_peer

MARK = "pytest.mark." + "gpu"


@pytest.fixture(autouse=True)
def compiled(builds: Builds) -> None:
    """No compiler runs: a part kills all children that this process gets during it."""
    builds.wait()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def part(code: str, limit: float = 60, tests: bool = False) -> Part:
    return Part("part", (sys.executable, "-c", code, "{out}"), limit, tests)


def done(part: Part, log: Path) -> Outcome:
    return run(part, part.limit, log)


def test_without_a_gpu_the_command_fails_with_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "needs a CUDA GPU" in shown.err
    assert "nothing was tested or measured" in shown.err


def test_kernels_are_tested_first_and_measured_next() -> None:
    tested, measured = gpu.PARTS[1:3]
    assert (tested.name, measured.name) == ("kernels equal the CPU's bits", "bench of kernels")
    given = dict(pairwise(measured.command))
    factor = int(given["--factor"])
    sizes = Options("kernels", min=given["--min"], max=given["--max"], factor=factor).sizes
    assert ALONE in sizes  # from this one on the table has figures


def test_every_gpu_test_is_in_exactly_one_part() -> None:
    parts = [p for p in gpu.PARTS if p.tests]
    places = [word for p in parts for word in p.command if word.startswith("tests")]
    files = [
        str(f) for f in Path("tests").rglob("test_*.py") if MARK in f.read_text(encoding="utf-8")
    ]
    assert sorted(f for f in files for place in places if f.startswith(place)) == sorted(files)
    # Overriding addopts would drop --import-mode=importlib, which test files of the same name need.
    assert not any("addopts" in word for p in parts for word in p.command)


def test_a_part_passes_or_fails(log: Path) -> None:
    rows = done(part("import sys; open(sys.argv[1], 'w').write('[1, 2]')"), log)
    assert (rows.state, rows.rows, rows.tail) == ("passed", [1, 2], "")
    failed = done(part("print('why'); raise SystemExit(3)"), log)
    assert (failed.state, failed.tail) == ("failed", "why\n")
    assert log.read_text(encoding="utf-8").count("==== part") == 2
    # killed while writing "µ" to both
    half = "import os, sys; os.write(1, b'5 \\xc2'); open(sys.argv[1], 'wb').write(b'[\"\\xc2')"
    killed = done(part(half + "; os.kill(os.getpid(), 9)"), log)
    assert (killed.state, killed.rows, killed.tail) == ("failed", None, "5 \ufffd")


def test_parts_limit_retries_of_the_name_server(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RES_OPTIONS", raising=False)  # set by tests/ranks.py
    found = done(part("import os; assert 'attempts:1' in os.environ['RES_OPTIONS']"), log)
    assert found.state == "passed", found.tail


# Started by a shell, which takes no time to start.
HANGS = ("sh", "-c", "trap '' INT; setsid sleep 600 & echo $!; sleep 600", "{out}")


def test_a_hanging_part_is_killed_with_its_children_at_its_limit(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_module, "GRACE", 0.6)
    unrelated = subprocess.Popen(["sleep", "600"])
    hung = done(Part("part", HANGS, 1.5, tests=False), log)
    assert hung.state == "timed out"
    assert not Path(f"/proc/{int(hung.tail)}").exists()
    assert unrelated.poll() is None  # a process that the part did not start
    unrelated.kill()
    unrelated.wait()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_part_ends_with_the_command(tmp_path: Path) -> None:
    command = ("sh", "-c", "setsid sleep 600 & echo $!; kill $PPID; sleep 600", "{out}")
    with pytest.raises(SignalError, match="SIGTERM"):
        main([Part("part", command, 60, tests=False)])
    *_, child = (tmp_path / "log").read_text(encoding="utf-8").split()
    assert not Path(f"/proc/{child}").exists()


def test_a_process_that_cannot_be_killed_is_left_behind(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_module, "GRACE", 0.1)
    monkeypatch.setattr(part_module.os, "kill", lambda *_: None)
    monkeypatch.setattr(part_module.os, "killpg", lambda *_: None)
    others = part_module._children()
    hung = done(Part("part", ("sleep", "600"), 0.1, tests=False), log)
    assert hung.state == "timed out"
    monkeypatch.undo()
    (pid,) = part_module._children() - others
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_part_counts_tests_and_collects_skip_reasons(tmp_path: Path, log: Path) -> None:
    (tmp_path / "none.ini").write_text("[pytest]\naddopts = -q\n", encoding="utf-8")
    file = tmp_path / "test_it.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.skip(reason='no CuPy')\n"
        "def test_a(): pass\n"
        "def test_b(): pass\n"
        "def test_c(): assert False\n",
        encoding="utf-8",
    )
    command = (*PYTEST[:-2], "-p", "no:cacheprovider", "-c", str(tmp_path / "none.ini"), str(file))
    found = done(Part("tests", (*command, "--junitxml", "{out}"), 60, tests=True), log)
    assert (found.state, found.passed, found.skipped) == ("failed", 1, 1)
    assert found.reasons == ["no CuPy"]
    assert "assert False" in found.tail
    # no junit report, as when pytest is killed
    without = done(Part("tests", command, 60, tests=True), log)
    assert (without.state, without.passed) == ("failed", 1)


def test_a_part_with_all_tests_skipped_is_skipped(log: Path) -> None:
    for tests, state in ((3, "skipped"), (4, "passed")):
        suite = f"<testsuites><testsuite tests='{tests}' skipped='3'/></testsuites>"
        code = f"import sys; open(sys.argv[1], 'w').write({suite!r})"
        found = done(part(code, tests=True), log)
        assert (found.state, found.passed, found.skipped) == (state, tests - 3, 3)


def test_the_report_is_written_after_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "LOG", tmp_path / "build" / "log")
    file = tmp_path / "nvidia-h200.json"
    kept = tmp_path / "kept" / "here"
    looks = "import sys; print('so far')\n"
    for name, has in ((file, '"passed"'), (kept / file.name, '"passed"'), (kept / "log", "====")):
        looks += f"assert {has!r} in open({str(name)!r}).read()\n"
    looks += "sys.exit(1)"
    assert main([part(""), part(looks)], copy=kept) == 1
    assert (kept / file.name).read_text(encoding="utf-8") == file.read_text(encoding="utf-8")
    assert "so far" in (kept / "log").read_text(encoding="utf-8")
    report = json.loads(file.read_bytes())
    assert (report["gpu"], report["versions"]["torch"]) == ("NVIDIA H200", version("torch"))
    assert [p["state"] for p in report["parts"]] == ["passed", "failed"]
    assert report["parts"][1]["tail"] == "so far\n"  # the part's assertions held
    assert main([part("")], copy=tmp_path) == 0  # where the results are
    assert main([part("")], seconds=0) == 1
    assert json.loads(file.read_bytes())["parts"][0]["state"] == "not begun"
    assert "failed in" in capsys.readouterr().out


@pytest.fixture
def as_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "any")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "LOG", tmp_path / "log")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_part_may_use_the_time_left_by_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, limits = [0.0], list[float]()
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    def taken(part: Part, limit: float, _: Path) -> Outcome:
        limits.append(limit)
        now[0] += {30.0: 12.0, 50.0: limit + part_module.GRACE, 20.0: 1.0}[part.limit]
        return Outcome(part.name, "passed")

    monkeypatch.setattr(gpu, "run", taken)
    parts = [part("", limit) for limit in (30, 50, 20)]
    main(parts, seconds=110)
    # the second hangs and is killed; the third still has its own limit
    assert limits == [35, 73, 20]
    limits.clear()
    main(parts, seconds=40)
    assert limits == [30, 28]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_part_is_skipped_if_the_part_it_needs_failed(
    tmp_path: Path,
) -> None:
    first, then = replace(part(""), name="first"), replace(part(""), needs="first")
    assert main([first, then]) == 0
    assert main([replace(first, command=("false",)), then]) == 1
    _, found = json.loads((tmp_path / "any.json").read_bytes())["parts"]
    assert (found["state"], found["reasons"]) == ("skipped", ["first: failed"])
    names = [p.name for p in gpu.PARTS]
    assert all(p.needs in names[:at] for at, p in enumerate(gpu.PARTS) if p.needs)


class Steps:
    """Stands in for the kernels over peer memory: every rank's buffer becomes the sum of all."""

    seconds = 0.5

    def run(self, programs: list[object], buffers: list[torch.Tensor]) -> None:
        for x in buffers:
            x.mul_(len(programs))


def test_kernels_over_peer_memory_are_timed_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PEER_BYTES", (64,))
    monkeypatch.setattr(gpu, "Timed", Steps)
    monkeypatch.setattr(gpu, "VirtualRanks", lambda n, kernels: kernels)
    ones = torch.ones
    monkeypatch.setattr(gpu.torch, "ones", lambda size, device: ones(size))
    gpu.peer(tmp_path / "rows")
    rows = json.loads((tmp_path / "rows").read_bytes())
    assert [(r["ranks"], r["algorithm"]) for r in rows[:3]] == [
        (2, "ring"),
        (2, "direct"),
        (4, "ring"),
    ]
    assert {(r["bytes"], r["p50_us"], r["wrong"]) for r in rows} == {(64, 5e5, 0)}
    right = Steps.run

    def fails(self: Steps, programs: list[object], buffers: list[torch.Tensor]) -> None:
        if len(programs) == 4:
            raise CollectiveTimeout("rank 1 waited")
        right(self, programs, buffers)

    for step, bad in ((fails, "error"), (lambda *_: None, "wrong")):
        monkeypatch.setattr(Steps, "run", step)
        with pytest.raises(SystemExit, match=f"wrong elements, or an error:(.|\n)*{bad}"):
            gpu.peer(tmp_path / "rows")
        rows = json.loads((tmp_path / "rows").read_bytes())
        assert len(rows) == 6
        assert {r["ranks"] for r in rows if r.get(bad)} == ({4} if bad == "error" else {2, 4, 8})


def test_filling_buffers_use_all_channels_of_a_gpu() -> None:
    assert kernels.TOGETHER * 132 // 2 * virtual.WORTH <= test_peer.FILLING  # two ranks on an H200


def test_the_gpu_sleeps_until_the_timed_launch_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            stream.append("|")

    class Kernels:
        def launch(self, *_: object) -> None:
            stream.append("launch")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: stream.append("sleep"))
    monkeypatch.setattr(gpu, "kernels_on", lambda device: Kernels())
    gpu.Timed().launch(kernels.Launch("", (1, 1), torch.zeros(1), 0))
    assert stream == ["sleep", "|", "launch", "|"]
