"""Ways that take turns, and what is said meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from bench import turns


def idle() -> Callable[[], object]:
    dist.init_process_group("gloo")
    return lambda: None


@pytest.mark.process
def test_jobs_take_turns_and_say_how_far_they_are(
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


def test_turns_of_one_job_say_what_they_are_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(turns, "slowest", list)
    assert len(turns.interleaved({"one": lambda: None}, "over the link", 1)["one"]) == 1
    assert (
        capfd.readouterr().err.splitlines()[0] == f"over the link: round 1 of {1 + turns.WARMUPS}"
    )
