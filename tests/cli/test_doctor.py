"""`ringdp doctor`: what is here, and what a job does that goes on meanwhile."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ringdp import Communicator
from ringdp.cli.doctor import report
from ringdp.cli.doctor.check import Check
from ringdp.cli.main import main
from ringdp.transport.watch import Watched, segments
from tests.ranks import Pool

pytestmark = pytest.mark.process


def test_what_is_here(capsys):
    assert main(["doctor"]) == 0  # these tests need all that ringdp needs
    shown = capsys.readouterr().out
    assert re.search(rf"^ok +torch +{re.escape(torch.__version__)}", shown, re.M)
    assert shown.endswith("ringdp can run here\n")


def test_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    checks = {check["what"]: check for check in found["checks"]}
    assert found["runs"]
    assert checks["cores"]["found"].startswith(f"{len(os.sched_getaffinity(0))} of ")
    assert all(
        check["well"] or check["advice"] or check["what"] == "GPUs" for check in found["checks"]
    )


@pytest.mark.parametrize(("needed", "code"), [(True, 1), (False, 0)])
def test_only_what_is_needed_counts(monkeypatch, capsys, needed, code):
    lacking = Check("[red]", "none", well=False, needed=needed, advice="get one")
    monkeypatch.setattr(report, "examine", lambda: [lacking])
    assert main(["doctor"]) == code
    assert re.match(r"(NO|-) +\[red\] +none *\n.*-> get one", capsys.readouterr().out)


def waits(comm: Communicator, path: str) -> None:
    while comm.rank == 1 and not Path(path).exists():
        time.sleep(0.01)
    comm.all_reduce(torch.ones(100), tag=5)


def arrive(comm: Communicator) -> None:
    comm.barrier()


@pytest.fixture
def hanging(ranks, tmp_path) -> Iterator[Pool]:
    """Two ranks, of which rank 0 waits for rank 1, which is in the user's code."""
    pool = ranks(2)
    pool(arrive)  # else its ranks may still be on their way to each other
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(pool, waits, str(tmp_path / "go"))
        while not any(watched.record(0).waits_for == 1 for watched in views(pool)):
            time.sleep(0.01)
        yield pool
        (tmp_path / "go").touch()
        job.result()


def views(pool: Pool) -> list[Watched]:
    return [Watched(path) for path in segments([pool.processes[0].pid])]


def test_a_running_job_is_shown_and_goes_on(hanging, capsys):
    for process in hanging.processes:
        assert main(["doctor", "--pid", str(process.pid)]) == 0
        shown = capsys.readouterr().out.splitlines()
        number = re.match(r"collective #(\d+): rank 1 has not called it$", shown[1])[1]
        call = rf"all_reduce #{number} \(float32, sum\) of 100  5 .* rank 1 .* {__file__}:\d+ "
        assert re.match(rf"0 +{call}", shown[3])
        assert re.match(r"1 +user code  ", shown[4])


def test_a_job_is_a_process_with_all_below_it(hanging, capsys):
    assert main(["doctor", "--job", str(os.getpid())]) == 0
    assert "rank 1 has not called it" in capsys.readouterr().out
    assert main(["doctor", "--job", "no such run"]) == 2
    assert "neither a process nor the --rdzv-id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pid", "4194305"], "there is no process 4194305"),  # beyond the largest pid
        (["--pid", str(os.getpid())], "holds no communicator of ringdp open"),
        (["--job", "4194305"], "4194305 is neither a process nor the --rdzv-id"),
        (["--json", "--pid", "1"], "takes one of"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(capsys, arguments, said):
    assert main(["doctor", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
