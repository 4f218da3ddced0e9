"""`ringdp bench kernels`: its rows, table, file and refused options."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ringdp.cli.bench import kernels as bench
from ringdp.cli.bench.kernel_cases import CASES, OURS, Case
from ringdp.cli.bench.kernels import ALONE, COPY, interleaved, timer_of
from ringdp.cli.main import main
from ringdp.kernels import __all__ as kernels

REFUSED = {
    "ranks": (["--ranks", "4"], "--ranks is for collectives; bench kernels takes --min"),
    "min": (["--min", "3"], "--min is 3; allowed"),
    "json": (["--json", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
}


def test_every_kernel_is_timed_with_torchs_alternatives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--min", "1K", "--max", "4K", "--rounds", "1", "--json", str(file)]
    assert main(["bench", "kernels", *arguments]) == 0
    report = json.loads(file.read_bytes())
    rows = report["rows"]
    assert {row["kernel"] for row in rows if row["way"] == OURS} == set(CASES) == set(kernels)
    assert list(dict.fromkeys(row["size"] for row in rows)) == [
        4096,
        1024,
    ]  # a run that is cut short has the largest size
    assert {row["kernel"] for row in rows if row["way"] != OURS} == set(CASES)
    for row in rows:
        assert row["bytes"] == CASES[row["kernel"]].moves * row["size"]
        rate = row["bytes"] / row["p50_us"] / 1e3
        rounding = 0.005 + 1.01 * rate * 0.0005 / row["p50_us"]  # of the rate, and of the time
        assert row["gb_s"] == pytest.approx(rate, abs=rounding)
        assert (row["over_ours"] is None) == (row["way"] == OURS)
    shown = capsys.readouterr().out
    assert shown.index("1,024  ") < shown.index("4,096  ") < shown.rindex("squared_norm")
    assert f"kernels on {report['device']}" in shown


def test_a_failing_implementation_loses_only_its_own_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("torch has no [such] function")

    def sometimes() -> None:
        calls.append(1)
        if len(calls) > 3:
            fail()

    def fine() -> None: ...

    calls: list[int] = []
    cases = {
        "flatten": Case(1, lambda *_: {OURS: fail, "cat": fine}),
        "fold": Case(1, lambda *_: {OURS: fine, "sum": sometimes, "add": fine}),
        "unscale": Case(1, fail),
        "adamw": Case(1, lambda *_: {OURS: fine}),
    }
    monkeypatch.setattr(bench, "CASES", cases)
    file = tmp_path / "rows.json"
    assert main(["bench", "kernels", "--min", "1K", "--max", "1K", "--json", str(file)]) == 1
    report = json.loads(file.read_bytes())
    ways = [(row["kernel"], row["way"]) for row in report["rows"]]
    assert ways == [("flatten", "cat"), ("fold", OURS), ("fold", "add"), ("adamw", OURS)]
    assert report["rows"][0]["over_ours"] is None
    failures = [(f["kernel"], f["way"]) for f in report["failures"]]
    assert failures == [("flatten", OURS), ("fold", "sum"), ("unscale", "its tensors")]
    error = "AttributeError: torch has no [such] function"
    assert {(f["size"], f["error"]) for f in report["failures"]} == {(1024, error)}
    assert f"flatten, ringdp, 1,024 bytes: {error}" in capsys.readouterr().out


def test_a_size_that_does_not_fit_loses_only_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(moves: float, elems: int, device: torch.device) -> Callable[[], object]:
        if elems > 256:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: None

    monkeypatch.setattr(bench, "CASES", {"fold": Case(1, lambda *_: {OURS: lambda: None})})
    monkeypatch.setattr(bench, "copy_of", copy)
    file = tmp_path / "rows.json"
    arguments = ["--min", "1K", "--max", "4K", "--rounds", "1", "--json", str(file)]
    assert main(["bench", "kernels", *arguments]) == 1
    report = json.loads(file.read_bytes())
    assert [row["size"] for row in report["rows"]] == [1024]
    assert [(f["size"], f["error"]) for f in report["failures"]] == [
        (4096, "OutOfMemoryError: CUDA out of memory")
    ]


def test_a_pipe_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader would take the first report as all."""
    monkeypatch.setattr(bench, "CASES", {"fold": Case(1, lambda *_: {OURS: lambda: None})})
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDWR)  # also for writing, so that a second write does not hang
    sizes = ["--min", "1K", "--max", "4K", "--rounds", "1"]
    assert main(["bench", "kernels", *sizes, "--json", str(pipe)]) == 0
    report = json.loads(os.read(reader, 1 << 16))
    os.close(reader)
    assert {row["size"] for row in report["rows"]} == {1024, 4096}


def test_implementations_take_turns() -> None:
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) for name in "ab"}
    found, failed = interleaved(ways, 3, timer_of(1 << 10, torch.device("cpu")))
    assert not failed
    assert {way: len(times) for way, times in found.items()} == {"a": 3, "b": 3}
    rounds = [name for before, name in zip(["", *calls], calls, strict=False) if before != name]
    # warm-up a, b; then rounds a b, b a, a b
    assert "".join(rounds) == "ababab"


def test_the_copy_moves_as_many_bytes_as_the_kernel() -> None:
    for moves, elems in ((1, 64), (1.5, 64), (9, 64), (1, 1)):
        copied = bench.copy_of(moves, elems, torch.device("cpu"))()
        assert isinstance(copied, torch.Tensor)
        assert 2 * copied.nbytes == max(8, 4 * moves * elems)
    (row,) = bench._rows("flatten", 64 << 20, {COPY: [0.25], OURS: [0.5]})
    assert (row.bytes, row.percent_of_copy) == (128 << 20, 50.0)


class Device:
    """Stands in for torch.cuda: records its stream, and reports that a call took 2 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: list[str] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                device.stream.append("|")

            def synchronize(self) -> None:
                device.stream.append("wait")

            def elapsed_time(self, end: Event) -> float:
                return 2.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.stream.append("sleep"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.stream.append("wait"))


def test_gpu_times_include_launches_only_for_small_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, zeros = Device(monkeypatch), torch.zeros

    class Evicting:
        def sum(self) -> None:
            device.stream.append("evict")

    def call() -> None:
        device.stream.append("call")

    monkeypatch.setattr(bench.torch, "zeros", lambda *_, **__: Evicting())
    small, large = (timer_of(size, torch.device("cuda")) for size in (ALONE - 4, ALONE))
    monkeypatch.setattr(bench.torch, "zeros", zeros)
    assert small.timed(call, 2) == pytest.approx(1e-3)
    assert device.stream == ["|", "call", "call", "|", "wait"]
    device.stream.clear()
    assert large.timed(call, 2) == pytest.approx(2e-3)
    assert device.stream == ["sleep", *2 * ["evict", "|", "call", "|"], "wait"]
    assert large.most < small.most


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str, refused) -> None:
    refused("bench", "kernels", *arguments, message=message)
