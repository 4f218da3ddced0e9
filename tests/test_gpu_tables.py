"""Tables of what `make gpu` measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import gpu, gpu_tables
from bench.part import Outcome
from ringdp.cli.bench.kernel_cases import CASES, OURS
from ringdp.cli.bench.kernels import Report, Row


def test_the_table_of_kernels_shows_measured_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tables, "RESULTS", tmp_path)
    assert gpu_tables.kernels().count("no GPU figure was measured") == len(CASES)
    # a file without a GPU's rows, such as train.json
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    common = {"kernel": "flatten", "bytes": 0, "min_us": 1.0, "p50_us": 1.0, "gb_s": 1.0}
    rows = [
        Row(way=way, size=size, percent_of_copy=percent, over_ours=over, **common)
        for way, size, percent, over in (
            (OURS, 1 << 20, 10.0, None),  # too small to be shown
            (OURS, 64 << 20, 95.4, None),
            ("cat", 256 << 20, 50.0, 1.5),
            ("cat", 1 << 30, 50.0, None),  # ours failed at this size
            ("_foreach", 256 << 20, 60.0, 1.25),
        )
    ]
    report = asdict(Report({}, "a GPU", rows))
    outcome = Outcome("bench of kernels", "passed", rows=report)
    assert outcome.name in {p.name for p in gpu.PARTS}
    text = json.dumps({"gpu": "a GPU", "versions": {}, "parts": [asdict(outcome)]})
    (tmp_path / "a-gpu.json").write_text(text, encoding="utf-8")
    shown = gpu_tables.kernels()
    assert "a GPU, % of a copy (× best of torch)" in shown
    assert "| flatten | 8 | 95 (1.25) |" in shown
    assert "| fold | 36 | not measured |" in shown
    assert "at least 1.25 times as long" in shown
    assert "from 1 MiB to 1024 MiB (least for flatten of 256 MiB)" in shown


def test_tables_show_the_figures_over_nccl_and_peer_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tables, "RESULTS", tmp_path)
    assert gpu_tables.nccl() == gpu_tables.peer_memory() == gpu_tables.NOTHING
    us = {"ring": 6000.0, "direct": 5000.0, "nccl": 4000.0}
    ours = [
        {"transport": "nccl", "algorithm": name, "bytes": size, "p50_us": time}
        for size in (64 << 10, 1 << 20)
        for name, time in us.items()
    ]
    torchs = {"transport": "torch-nccl", "bytes": 1 << 20, "p50_us": 2000.0}
    over_peers = [
        {"ranks": 2, "algorithm": name, "bytes": size, "busbw": gb_s}
        for name, size, gb_s in (
            ("ring", 1 << 20, 10.4),
            ("ring", 2 << 20, 20.6),
            ("direct", 1 << 20, 9),
        )
    ]
    rows = {
        "bench of NCCL: our schedules beside its own": {"rows": ours},
        "bench of NCCL: ours beside torch's": {"rows": [ours[-1] | {"p50_us": 1.0}, torchs]},
        "bench of peer memory": [*over_peers, {"ranks": 4, "error": "OutOfMemoryError"}],
    }
    assert rows.keys() <= {p.name for p in gpu.PARTS}
    parts = [asdict(Outcome(name, "passed", rows=found)) for name, found in rows.items()]
    text = json.dumps({"gpu": "a GPU", "versions": {}, "parts": parts})
    (tmp_path / "a-gpu.json").write_text(text, encoding="utf-8")
    assert gpu_tables.nccl().splitlines()[2:] == [
        "| a GPU, 64 KiB | 6.0 | 5.0 | 4.0 |  | 1.50 |",
        "| a GPU, 1 MiB | 6.0 | 5.0 | 4.0 | 2.0 | 1.50 |",
    ]
    assert gpu_tables.peer_memory().splitlines()[2:] == [
        "| a GPU, 2 ranks, ring | 10 | 21 |",
        "| a GPU, 2 ranks, direct | 9 |  |",
    ]
