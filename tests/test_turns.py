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
    monkeypatch.setattr(turns, "STARTS", 1)
    times = turns.between_jobs(1, {"one": idle, "other": idle}, rounds=2)
    assert [len(seconds) for seconds in times.values()] == [2, 2]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert [line for line in shown.err.splitlines() if "round" in line] == [
        f"start 1 of 1: round {k} of {2 + turns.WARMUPS}" for k in range(1, 3 + turns.WARMUPS)
    ]


def test_jobs_are_started_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "STARTS", 2)
    monkeypatch.setattr(turns, "_started", lambda ranks, ways, rounds, what: {"one": [what]})
    assert turns.between_jobs(1, {"one": idle}, rounds=2) == {
        "one": ["start 1 of 2", "start 2 of 2"]
    }


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
