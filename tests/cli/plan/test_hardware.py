"""α β γ of named networks and of bench files, and when a prediction is an extrapolation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ringdp.cli.bench.cases import Task
from ringdp.cli.bench.rows import Report, measured
from ringdp.cli.files import write_json
from ringdp.cli.plan.hardware import from_files, network
from ringdp.errors import UsageError
from ringdp.schedule.cost import Machine, closed, seconds
from tests.cli.conftest import edited

TRUE = Machine(alpha=2e-6, beta=1e-10, gamma=3e-11)


def rows(path: Path, *, transport: str = "shm") -> Path:
    """A bench file whose medians follow TRUE exactly."""
    made = []
    for n in (2, 4, 8):
        for size in (1 << 10, 1 << 16, 1 << 22):
            for collective in ("all_reduce", "all_gather"):
                time = seconds(closed(collective, "direct", n), TRUE, size)
                task = Task(collective, "direct", True, "float32", "sum", size // 4)
                made.append(measured(task, transport, n, [time], 0.0, 0))
    write_json(path, Report({}, {}, made))
    return path


def test_a_network_can_be_given_in_bits_or_bytes():
    found = network("400Gb", "h100", 16)
    assert found.machine == (1e-5, 2e-11, pytest.approx(3 / 3.35e12), 0.0, 0.0, ())
    assert network("50GB", "h100", 16).machine == found.machine
    assert network("50GB", "h100", 16, alpha=0.5).machine.alpha == 0.5
    within = network(None, "h100", 8)
    assert within.machine.beta == 1 / 450e9
    assert "within its node" in within.source


def test_a_bench_file_is_fitted(tmp_path):
    found = from_files(str(rows(tmp_path / "b.json")))
    for n, size in ((2, 1 << 10), (8, 1 << 22), (6, 1 << 18)):
        price = closed("all_reduce", "direct", n)
        assert seconds(price, found.machine, size) == pytest.approx(
            seconds(price, TRUE, size), 1e-2
        )


def test_collectives_are_fitted_separately(tmp_path):
    """Halving the times of all_gather does not change the fit of all_reduce."""
    path = rows(tmp_path / "b.json")
    with edited(path) as report:
        for row in report["rows"]:
            row["p50_us"] *= 0.5 if row["collective"] == "all_gather" else 1
    found = from_files(str(path))
    for collective, factor in (("all_reduce", 1), ("all_gather", 0.5)):
        price = closed(collective, "direct", 4)
        expected = factor * seconds(price, TRUE, 1 << 20)
        assert seconds(price, found.of(collective), 1 << 20) == pytest.approx(expected, 1e-2)
    assert found.of("reduce_scatter") == found.machine


def test_several_bench_files_are_read_together(tmp_path):
    """`ringdp bench` writes one file per collective."""
    paths = []
    for collective in ("all_reduce", "all_gather"):
        paths.append(rows(tmp_path / f"{collective}.json"))
        with edited(paths[-1]) as report:
            report["rows"] = [r for r in report["rows"] if r["collective"] == collective]
    given = " ,".join(map(str, paths))
    found, together = network(given, "h100", 2), from_files(str(rows(tmp_path / "both.json")))
    assert {*found.measured} == {*together.measured}
    assert found.fitted == together.fitted
    with edited(paths[1]) as report:
        report["machine"] = {"cpu": "two"}
    with pytest.raises(UsageError, match=r"were measured on None .*, two .*; allowed: files of"):
        network(given, "h100", 2)


def test_one_transport_of_a_file_is_fitted(tmp_path):
    """The first transport of a file is used; rows of another, ten times as slow, change nothing."""
    path = rows(tmp_path / "b.json")
    alone = from_files(str(path))
    with edited(path) as report:
        own = report["rows"]
        slow = [r | {"transport": "nccl", "p50_us": 10 * r["p50_us"]} for r in own]
        report["rows"] = own + slow
    assert from_files(str(path)).machine == alone.machine
    with edited(path) as report:
        report["rows"] = slow + own
    assert " nccl rows of" in from_files(str(path)).source
    assert from_files(str(path)).beside(64), "communication between GPUs takes no core"


def test_gathers_yield_in_host_memory_only(tmp_path):
    """Equal to the engine's rule, see `Engine.yields`."""
    for transport, yields in (("shm", True), ("nccl-host", True), ("c10d", False), ("nccl", False)):
        assert from_files(str(rows(tmp_path / "b.json", transport=transport))).yields == yields
    assert not network("400Gb", "h100", 16).yields


def test_communication_overlaps_compute_only_with_spare_cores(tmp_path):
    path = rows(tmp_path / "b.json")
    with edited(path) as report:
        report["machine"] = {"cores": "8"}
    assert [from_files(str(path)).beside(n) for n in (2, 4, 5)] == [True, True, False]
    assert network("400Gb", "h100", 16).beside(1000)


def test_extrapolations_are_listed(tmp_path):
    found = from_files(str(rows(tmp_path / "b.json")))
    optimizer = "the optimizer, at the bytes/s of the largest collective"
    assert found.beyond({"all_reduce", "all_gather"}, 4, {1 << 10, 1 << 22}) == [optimizer]
    over_gpus = from_files(str(rows(tmp_path / "b.json", transport="nccl")))
    assert over_gpus.beyond({"all_reduce"}, 4, {1 << 10}) == []
    assert found.beyond({"reduce_scatter"}, 64, {1 << 30}) == [
        "64 ranks, measured 2, 4, 8",
        "1,073,741,824 bytes of buffers, measured 1,024 to 4,194,304",
        "reduce_scatter, measured all_gather, all_reduce",
        optimizer,
    ]
    named = network("400Gb", "h100", 16)
    assert named.beyond({"all_reduce"}, 2, {1}) != []


@pytest.mark.parametrize("given", ["400Gb", "400Gb/s", "400Gbps", "400 Gb", "50GB/s", " 50 GB/s "])
def test_every_spelling_of_a_rate_is_accepted(given):
    found = network(given, "h100", 16)
    assert found.machine.beta == 2e-11
    assert found.source.startswith(("400Gb/s a rank", "50GB/s a rank"))


@pytest.mark.parametrize(
    "given", ["", "400gb", "400Gbit", "400", "fast", "0Gb", "-1Gb", "nanGb", "400GiB"]
)
def test_malformed_networks_are_refused(given):
    with pytest.raises(UsageError, match=f"--network is '{given}'; allowed: bits"):
        network(given, "h100", 16)


def test_gpu_rows_without_a_bound_are_fitted(tmp_path):
    path = rows(tmp_path / "b.json", transport="nccl")
    expected = from_files(str(path)).machine
    with edited(path) as report:
        for row in report["rows"]:
            row["bound_us"] = None
    assert from_files(str(path)).machine == expected


WRONG = {
    "collective": [],
    "registered": "x",
    "ranks": 0,
    "bytes": 2.5,
    "dtype": None,
    "p50_us": math.inf,
    "p20_us": "fast",
    "wrong": -1,
}


@pytest.mark.parametrize("key", WRONG)
def test_malformed_rows_are_refused(tmp_path, key):
    path = rows(tmp_path / "b.json")
    with edited(path) as report:
        report["rows"][-1][key] = WRONG[key]
    with pytest.raises(UsageError, match=r"b.json holds no results .* a row lacks its numbers"):
        from_files(str(path))


@pytest.mark.parametrize("algorithm", ["FILE:star", "hierarchical:2"])
def test_algorithms_named_in_a_file_are_not_run(tmp_path, algorithm):
    """Results are data: reading them runs no code, and proves no schedule for 2000 ranks."""
    path, source = rows(tmp_path / "b.json"), tmp_path / "mine.py"
    source.write_text("raise SystemExit('run')", encoding="utf-8")
    expected = from_files(str(path)).machine
    named = {"algorithm": algorithm.replace("FILE", str(source)), "ranks": 2000}
    with edited(path) as report:
        others = [row | named for row in report["rows"]]
        report["rows"] += others
    assert from_files(str(path)).machine == expected
    with edited(path) as report:
        report["rows"] = others
    with pytest.raises(UsageError, match=r"b.json holds no row of ringdp's own"):
        from_files(str(path))


def test_files_without_ringdps_rows_are_refused(tmp_path):
    path = tmp_path / "other.json"
    with pytest.raises(UsageError, match=r"other.json holds no row of ringdp's own"):
        from_files(str(rows(path, transport="gloo")))
    with pytest.raises(UsageError, match=r"--alpha is 1.0; allowed: none with"):
        network(str(rows(path)), "h100", 2, alpha=1.0)
