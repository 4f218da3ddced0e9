"""`make gpu` over another environment: which packages it sees, its time limits and its options."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import overlay


def test_an_overlay_sees_installed_packages_and_names_missing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = overlay.make(tmp_path / "over")
    code = "import sys, rich; print(sys.prefix)"
    seen = subprocess.run([python, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert seen.stdout.strip() == str(tmp_path / "over")
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(overlay.install(python))
    monkeypatch.setattr(overlay, "RUN", ("torch", "no-such-package"))
    assert overlay.main([]) == 1
    assert "has no no-such-package" in capsys.readouterr().err


def test_an_overlay_passes_on_the_time_left_and_the_copy_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlay, "BUILD", ())
    monkeypatch.setattr(overlay, "RUN", ())
    monkeypatch.setattr(overlay, "HERE", tmp_path)
    monkeypatch.setattr(overlay, "make", lambda at: "python")
    monkeypatch.setattr(overlay, "limited", lambda *_: (0, ""))
    monkeypatch.setattr(overlay, "BEGUN", 100.0)
    monkeypatch.setattr(
        overlay.time, "monotonic", lambda: 170.0
    )  # importing torch and building took 70 s
    executed: list[list[str]] = []
    monkeypatch.setattr(overlay.os, "execv", lambda _, words: executed.append(words))
    assert overlay.main(["--copy", "kept"]) == 0
    assert executed[0][:5] == ["python", "-m", "bench.gpu", "--seconds", str(overlay.SECONDS - 70)]
    assert executed[0][5:] == ["--copy", "kept"]


def test_a_hanging_build_is_killed_with_its_children() -> None:
    failed, output = overlay.limited(["sh", "-c", "sleep 600 & wait"], 1.0)
    assert failed == 1  # returns only once the child, too, has closed its output
    assert "took more than 1 s" in output
    assert overlay.limited(["sh", "-c", "printf '1\\302'; exit 3"], 60) == (3, "1\ufffd")
    assert overlay.BUILD_SECONDS < overlay.SECONDS / 2
