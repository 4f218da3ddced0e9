"""Bad input gives exit code 2 and one line on stderr that says what was wrong and what is
allowed."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ringdp.cli.main import main

REFUSED = {
    "ranks 0": (["--ranks", "0"], "--ranks is 0; allowed: a whole number from 1 to 64"),
    "ranks many": (["--ranks", "65"], "--ranks is 65; allowed"),
    "ranks a word": (["--ranks", "two"], "--ranks"),
    "stage 4": (["--stage", "4"], "--stage is '4'; allowed: all, 0, 1, 2, 3"),
    "stage a word": (["--stage", "0,zero"], "--stage is '0,zero'; allowed"),
    "stage empty": (["--stage", ""], "--stage is ''; allowed"),
    "mode": (["--mode", "zero"], "allowed: all, naive, parameter-server, async, ddp, or some as"),
    "mode and stage": (["--mode", "ddp", "--stage", "0"], "train takes either --stage or --mode"),
    "steps 0": (["--steps", "0"], "--steps is 0; allowed"),
    "seed negative": (["--seed", "-1"], "--seed is -1; allowed"),
    "batch": (["--ranks", "2", "--batch", "3"], "--batch is 3; allowed: a multiple of --ranks"),
    "context 0": (["--context", "0"], "--context is 0; allowed"),
    "rate": (["--learning-rate", "nan"], "--learning-rate is nan; allowed"),
    "missing text": (["--text", "/nowhere/at all"], "cannot read /nowhere/at all: No such file"),
    "text empty": (["--text", ""], "a path is empty; allowed"),
    "text a device": (["--text", "/dev/null"], "cannot read /dev/null: it is neither"),
    "json nowhere": (["--json", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
    "json a new directory": (["--json", "/tmp/new/"], "/tmp/new/ names a directory; allowed: a"),
    "trace a new directory": (["--trace", "new/."], "'--trace': new/. names a directory; allowed"),
    "json empty": (["--json", ""], "'--json': a path is empty; allowed: a file in"),
    "json a dash": (["--json", "-"], "cannot write -: it means standard output, not a file"),
    "json a directory": (["--json", "/tmp"], "cannot write /tmp: Is a directory"),
    "json of a long name": (["--json", "n" * 300], "nnn: File name too long; allowed: a file in"),
    "trace the root": (["--trace", "/"], "--trace: cannot write /: Is a directory"),
    "trace of modes": (["--trace", "run.json", "--mode", "ddp"], "--trace is given with --mode"),
    "transport": (["--transport", "mpi"], "--transport is 'mpi'; allowed: shm, c10d, nccl, nccl-h"),
    "transport of modes": (
        ["--transport", "c10d", "--mode", "ddp"],
        "--transport is given with --mode; allowed: with --stage",
    ),
    "trace a device": (["--trace", "/proc/self/fd/0"], "fd/0: it is a device or a pipe"),
    "trace and json": (
        ["--trace", "/tmp/ringdp-1", "--json", "/tmp/../tmp/ringdp-1"],
        "--json and --trace are both /tmp/ringdp-1; allowed: two files",
    ),
    "unknown option": (["--rank", "2"], "--rank"),
    "missing value": (["--ranks"], "--ranks"),
    "extra argument": (["now"], "(now); see `ringdp train --help`"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str, refused) -> None:
    refused("train", *arguments, message=message)


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("Usage: ringdp ")
    assert captured.err == ""


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.endswith("; see `ringdp --help`\n")


def test_a_too_short_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"x" * 64)
    assert main(["train", "--text", str(short), "--context", "64"]) == 2
    assert "holds 64 bytes of text; allowed" in capsys.readouterr().err
    assert main(["train", "--text", str(tmp_path), "--context", "64"]) == 2
    assert "at least 65 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_a_refused_run_leaves_files_as_they_were(tmp_path: Path, option: str) -> None:
    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("before", encoding="utf-8")
    link.symlink_to("target.json")
    for file in (old, link, tmp_path / "new.json"):
        assert main(["train", option, str(file), "--text", "/nowhere"]) == 2
    assert sorted(tmp_path.iterdir()) == [link, old]
    assert link.is_symlink()
    assert old.read_text(encoding="utf-8") == "before"


@pytest.mark.parametrize("columns", ["80", "40"])
def test_the_help_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["--help"]) == 0
    _, shown = capsys.readouterr().out.split("Commands:")
    assert len(re.findall(r"(?m)^  \w+  ", shown)) == 6
    assert "..." not in shown


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ringdp {metadata.version('ringdp')}\n"


def test_the_command_runs_as_a_module() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ringdp", "--version"],
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    assert shown.stdout == f"ringdp {metadata.version('ringdp')}\n"
