"""`ringdp train --mode`: its table and JSON, and a run that breaks each check."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ringdp.cli.main import main
from ringdp.cli.modes import ModeRun, Part, complaints, show
from ringdp.cli.options import MODES
from tests.cli.conftest import printed
from tests.cli.rows import REFERENCE

WORKER = Part((5.5, 4.0, 2.5), (0.2, 0.1, 0.1), 10, "d")
SERVER = Part((), (), 20, "d")
RUNS = {
    "naive": ModeRun("naive", 2, 1000, (replace(WORKER, sent=33),), 33),
    "parameter-server": ModeRun("parameter-server", 2, 1000, (SERVER, WORKER, WORKER), 40),
    "async": ModeRun(
        "async", 2, 1000, (replace(SERVER, staleness=(0, 1, 1, 2)), WORKER, WORKER), 40
    ),
    "ddp": ModeRun("ddp", 2, 1000, (WORKER, WORKER), 20),
}


def broken(mode: str, **changes: object) -> list[ModeRun]:
    run = RUNS[mode]
    parts = (*run.parts[:-1], replace(run.parts[-1], **changes))
    return [*(r for m, r in RUNS.items() if m != mode), replace(run, parts=parts)]


def test_correct_runs_have_no_complaints() -> None:
    assert complaints(list(RUNS.values()), REFERENCE) == []


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (broken("ddp", sent=11), "ddp: 21 bytes sent, formula 20"),
        (broken("async", loss=(5.5, 4.0, math.nan)), "async: a loss is not finite"),
        (broken("naive", loss=(5.5, 4.1, 2.5)), "naive: |Δloss| from the single process is 1.0"),
        (broken("ddp", digest="e"), "ddp: processes differ in a parameter"),
        (broken("ddp", loss=(5.5, 4.000001, 2.5)), "parameter-server and ddp differ"),
    ],
)
def test_a_broken_check_is_named(runs: list[ModeRun], message: str) -> None:
    assert any(message in line for line in complaints(runs, REFERENCE))


def test_the_table_fits_80_columns_and_has_traffic_and_staleness() -> None:
    lines = printed(lambda c: show(c, list(RUNS.values()), REFERENCE, []), 80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    cells = {line[:20].strip(): line[20:].split() for line in lines}
    assert cells["sent, all processes"] == ["33", "40", "40", "20"]
    assert cells["formula"] == ["=", "33", "=", "40", "=", "40", "=", "20"]
    assert cells["sent, the busiest"] == ["33", "20", "20", "10"]
    assert cells["staleness, mean"] == ["0", "0", "1", "0"]
    assert cells["most"] == ["0", "0", "2", "0"]
    assert "parameter-server and ddp are equal bit for bit." in " ".join(" ".join(lines).split())


@pytest.mark.process
def test_ddp_may_rebuild_its_buckets_in_the_last_step(capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--steps", "2", "--batch", "2", "--context", "8", "--no-reference"]
    code = main(["train", "--mode", "ddp", *small])
    assert code == 0, capfd.readouterr().out


@pytest.mark.process
def test_all_modes_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    small = ["--steps", "3", "--batch", "4", "--context", "16", "--seed", "1"]
    code = main(["train", "--mode", "all", *small, "--json", str(out)])
    shown = capfd.readouterr().out
    assert code == 0, shown
    assert "equal bit for bit" in shown
    assert "the loss is of one worker's rows" in shown.splitlines()[1]
    assert shown.endswith(f"\nwrote {out}\n")
    runs = {run["mode"]: run for run in json.loads(out.read_bytes())}
    assert list(runs) == list(MODES)
    size = 4 * runs["ddp"]["parameters"]
    assert runs["ddp"]["traffic"]["sent_bytes_per_step"] == 2 * size
    assert runs["async"]["traffic"]["sent_bytes_per_step"] == 4 * size
    assert runs["parameter-server"]["traffic"]["busiest_process"] == 2 * size
    assert runs["parameter-server"]["loss"] == runs["ddp"]["loss"]
    assert len(runs["async"]["staleness"]) == 6
