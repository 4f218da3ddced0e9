"""Tables of what `make gpu` measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import gpu, gpu_tables
from bench.part import Outcome
from ringdp.cli.bench.kernel_cases import CASES, OURS
from ringdp.cli.bench.kernels import Report, Row
from ringdp.cli.files import write_json


def write(file: Path, device: str, rows: dict[str, object]) -> None:
    """A file of results whose parts have these rows."""
    assert rows.keys() <= {p.name for p in gpu.PARTS}
    parts = [Outcome(name, "passed", rows=found) for name, found in rows.items()]
    write_json(file, {"gpu": device, "versions": {}, "parts": parts})


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
    write(tmp_path / "a-gpu.json", "a GPU", {"bench of kernels": Report({}, "a GPU", rows)})
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
    alone = [ours[0] | {"bytes": 2 << 20}]  # the others failed at this size
    torchs = {"transport": "torch-nccl", "bytes": 1 << 20, "p50_us": 2000.0}
    over_peers = [
        {"ranks": 2, "algorithm": name, "bytes": size, "busbw": gb_s, "wrong": wrong}
        for name, size, gb_s, wrong in (
            ("ring", 1 << 20, 10.4, 0),
            ("ring", 2 << 20, 20.6, 0),
            ("direct", 1 << 20, 9, 0),
            ("direct", 2 << 20, 9, 5),
        )
    ]
    less = {"ranks": 4, "algorithm": "ring", "bytes": 1 << 20, "error": "OutOfMemoryError"}
    rows = {
        "bench of NCCL: our schedules beside its own": {"rows": ours + alone},
        "bench of NCCL: ours beside torch's": {"rows": [ours[-1] | {"p50_us": 1.0}, torchs]},
        "bench of peer memory": over_peers,
    }
    write(tmp_path / "a-gpu.json", "a GPU", rows)
    write(tmp_path / "other.json", "one with fewer rows", {"bench of peer memory": [less]})
    assert gpu_tables.nccl().splitlines()[2:] == [
        "| a GPU, 64 KiB | 6.0 | 5.0 | 4.0 | not measured | 1.50 |",
        "| a GPU, 1 MiB | 6.0 | 5.0 | 4.0 | 2.0 | 1.50 |",
        "| a GPU, 2 MiB | 6.0 | not measured | not measured | not measured | not measured |",
    ]
    heads, _, *lines = gpu_tables.peer_memory().splitlines()
    assert heads == "| busbw, GB/s | 1 MiB | 2 MiB |"
    assert lines == [
        "| a GPU, 2 ranks, ring | 10 | 21 |",
        "| a GPU, 2 ranks, direct | 9 | not measured |",
        "| one with fewer rows, 4 ranks, ring | not measured | not measured |",
    ]
