"""`make gpu` without a GPU, and how it runs its parts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from bench import gpu, kernel_table
from bench.gpu import PYTEST, Outcome, Part, main, run
from ringdp.cli.bench.kernel_cases import CASES, OURS
from ringdp.cli.bench.kernels import Report, Row


def part(code: str, limit: float = 60, tests: bool = False) -> Part:
    return Part("part", (sys.executable, "-c", code, "{out}"), limit, tests)


def test_says_plainly_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "needs a CUDA GPU" in shown.err
    assert "nothing was tested or measured" in shown.err


def test_takes_less_than_ten_minutes() -> None:
    assert sum(p.limit for p in gpu.PARTS) < 600
    assert all("{out}" in p.command for p in gpu.PARTS)


def test_a_part_passes_fails_or_is_ended_at_its_limit() -> None:
    rows = run(part("import sys; open(sys.argv[1], 'w').write('[1, 2]')"))
    assert (rows.state, rows.rows, rows.tail) == ("passed", [1, 2], "")
    failed = run(part("print('why'); raise SystemExit(3)"))
    assert (failed.state, failed.tail) == ("failed", "why\n")
    hung = run(Part("part", ("sh", "-c", "echo here; exec sleep 60"), 1, False))
    assert (hung.state, hung.tail) == ("timed out", "here\n")


def test_counts_tests_and_says_why_some_were_skipped(tmp_path: Path) -> None:
    (tmp_path / "none.ini").write_text("[pytest]\n")
    file = tmp_path / "test_it.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.skip(reason='no CuPy')\n"
        "def test_a(): pass\n"
        "def test_b(): pass\n"
        "def test_c(): assert False\n"
    )
    command = (*PYTEST[:-2], "-c", str(tmp_path / "none.ini"), "--junitxml", "{out}", str(file))
    found = run(Part("tests", command, 60, tests=True))
    assert (found.state, found.passed, found.skipped) == ("failed", 1, 1)
    assert found.reasons == ["no CuPy"]
    assert "assert False" in found.tail


def test_a_part_whose_tests_were_all_skipped_has_not_passed() -> None:
    for tests, state in ((3, "skipped"), (4, "passed")):
        suite = f"<testsuites><testsuite tests='{tests}' skipped='3'/></testsuites>"
        found = run(part(f"import sys; open(sys.argv[1], 'w').write({suite!r})", tests=True))
        assert (found.state, found.passed, found.skipped) == (state, tests - 3, 3)


def test_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    assert main([part("")]) == 0
    assert main([part(""), part("raise SystemExit(1)")]) == 1
    report = json.loads((tmp_path / "nvidia-h200.json").read_text())
    assert report["gpu"] == "NVIDIA H200"
    assert [p["state"] for p in report["parts"]] == ["passed", "failed"]
    assert "failed in" in capsys.readouterr().out


def test_the_table_of_kernels_shows_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_table, "RESULTS", tmp_path)
    assert kernel_table.table().count("no GPU figure was measured") == len(CASES)
    (tmp_path / "other.json").write_text("[]")  # as train.json, a list
    common = {"kernel": "flatten", "bytes": 0, "min_us": 1.0, "p50_us": 1.0, "gb_s": 1.0}
    rows = [
        Row(way=way, size=size, percent_of_copy=percent, over_ours=over, **common)
        for way, size, percent, over in (
            (OURS, 1 << 20, 10.0, None),  # small: not shown
            (OURS, 64 << 20, 95.4, None),
            ("cat", 64 << 20, 50.0, 1.5),
            ("_foreach", 64 << 20, 60.0, 1.25),
        )
    ]
    report = asdict(Report({}, "a GPU", rows))
    outcome = Outcome("bench of kernels", "passed", 1.0, rows=report)
    assert outcome.name in {p.name for p in gpu.PARTS}
    file = tmp_path / "a-gpu.json"
    file.write_text(json.dumps({"gpu": "a GPU", "versions": {}, "parts": [asdict(outcome)]}))
    shown = kernel_table.table()
    assert "a GPU, % of a copy (× best of torch)" in shown
    assert "| flatten | 8 | 95 (1.25) |" in shown
    assert "| fold | 36 | not measured |" in shown
