"""Standard output that cannot encode µ, is full, or is closed."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest

from ringdp.cli.main import main

PLAN = ["plan", "--model", "gpt2"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("arguments", [["show", "ring", "--cost"], PLAN], ids=lambda a: a[0])
def test_unencodable_characters_become_question_marks(arguments, encoding, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding=encoding))
    assert main(arguments) == 0
    assert b"?" in out.getvalue()


def test_a_files_name_need_not_be_unicode(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("\udcff.py").write_bytes(b"import torch\ndef f(): return torch.nn.Linear(1, 1)\n")
    assert main(["plan", "--model", "\udcff.py:f", "--json", "plan.json"]) == 0
    assert json.loads(Path("plan.json").read_bytes())["model"] == "\udcff.py:f"


@pytest.mark.parametrize("arguments", [["show", "ring"], PLAN], ids=lambda a: a[0])
def test_a_full_disk_is_reported_in_one_line(arguments, monkeypatch, capsys):
    with Path("/dev/full").open("w", encoding="utf-8") as full, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        assert main(arguments) == 1
    assert capsys.readouterr().err == "ringdp: [Errno 28] No space left on device\n"


def test_results_are_shown_even_if_they_cannot_be_written(capsys):
    assert main([*PLAN, "--json", "/dev/full"]) == 1
    shown = capsys.readouterr()
    assert "Recommended: stage 1" in shown.out
    assert shown.err == "ringdp: cannot write /dev/full: No space left on device\n"


def test_a_closed_pipe_is_no_error(tmp_path: Path, monkeypatch, capsys):
    """As in `ringdp plan --json FILE | head -0`."""
    file = tmp_path / "plan.json"
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", pipe)
        assert main([*PLAN, "--json", str(file)]) == 0
        assert main(["show", "--list"]) == 0, "later output is dropped"
    assert json.loads(file.read_bytes())["model"] == "gpt2"
    assert capsys.readouterr().err == ""


def test_an_interrupt_while_the_process_ends_is_ignored(monkeypatch):
    monkeypatch.setattr("sys.argv", ["ringdp", "show", "ring"])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main() == 0
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_reported(monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ringdp.cli.show.text", interrupted)
    assert main(["show", "ring"]) == 130
    assert capsys.readouterr().err.endswith("ringdp: ended by SIGINT\n")
