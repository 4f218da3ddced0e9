"""The whole command, small: its JSON, its exit code, and what it promises of the numbers."""

import json
from pathlib import Path

import pytest

from ringdp.cli.main import main

pytestmark = pytest.mark.process

SMALL = ["train", "--steps", "3", "--batch", "4", "--context", "16", "--seed", "1"]
MEMORY_KEYS = {"parameters", "gathered_peak", "gradients", "buckets", "optimizer"}


def test_all_stages_at_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    code = main([*SMALL, "--ranks", "2", "--json", str(out)])
    shown = capfd.readouterr().out
    assert code == 0, shown
    assert "Stages 0, 1, 2, 3 are equal bit for bit" in shown
    assert "It writes: " in shown
    runs = json.loads(out.read_text())
    assert [run["stage"] for run in runs] == [0, 1, 2, 3]
    for run in runs:
        assert set(run) == {
            *("stage", "ranks", "parameters", "loss", "step_ms", "tokens_per_s"),
            *("memory", "traffic"),
        }
        assert run["ranks"] == 2
        assert run["loss"] == runs[0]["loss"]
        assert len(run["loss"]) == 3
        assert set(run["step_ms"]) == {"p20", "p50", "p80"}
        assert set(run["memory"]) == {*MEMORY_KEYS, "formula"}
        assert {key: run["memory"][key] for key in MEMORY_KEYS} == run["memory"]["formula"]
        assert run["traffic"]["sent_bytes_per_step"] == run["traffic"]["formula"] > 0


def test_one_stage_writes_an_object(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--ranks", "3", "--stage", "3", "--batch", "6", "--no-reference", "--no-sample"]
    assert main([*SMALL, *arguments, "--json", str(out)]) == 0
    run = json.loads(out.read_text())
    assert (run["stage"], run["ranks"]) == (3, 3)
