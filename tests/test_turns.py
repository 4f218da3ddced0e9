"""Measurements that take turns, and the progress that they print."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from bench import turns


def idle() -> Callable[[], object]:
    dist.init_process_group("gloo")
    return lambda: None


@pytest.mark.process
def test_jobs_take_turns_and_print_progress(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "STARTS", 2)
    times = turns.between_jobs(1, {"one": idle, "other": idle}, rounds=2)
    assert [len(seconds) for seconds in times.values()] == [4, 4]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert [line for line in shown.err.splitlines() if "round" in line] == [
        f"start {start} of 2: round {k} of {2 + turns.WARMUPS}"
        for start in (1, 2)
        for k in range(1, 3 + turns.WARMUPS)
    ]


def test_progress_of_one_job_names_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(turns, "slowest", list)
    assert len(turns.interleaved({"one": lambda: None}, "over the link", 1)["one"]) == 1
    assert (
        capfd.readouterr().err.splitlines()[0] == f"over the link: round 1 of {1 + turns.WARMUPS}"
    )
