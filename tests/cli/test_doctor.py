"""`ringdp doctor`: the checks of this machine, and a running job seen from outside."""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from ringdp import Communicator
from ringdp.cli.doctor import job, report
from ringdp.cli.doctor.job import family
from ringdp.cli.loopback import loopback_store
from ringdp.cli.main import main
from ringdp.comm import inspection
from ringdp.comm.call import fingerprint
from ringdp.transport.records import SITE_BYTES
from ringdp.transport.shm.watch import Watched, segments
from ringdp.transport.store.processes import has_ended, introduce, process_state
from ringdp.transport.store.status import StatusBoard
from tests.ranks import Pool
from tests.transport.nccl.faults import LACKS_HOST_NCCL, WHY
from tests.waiting import wait_until

pytestmark = pytest.mark.process
PR_SET_NAME = 15  # linux/prctl.h


def test_the_checks_of_this_machine_pass(capsys):
    assert main(["doctor"]) == 0  # the tests need everything that ringdp needs
    shown = capsys.readouterr().out
    assert re.search(rf"^ok +torch +{re.escape(torch.__version__)}", shown, re.M)
    assert shown.endswith("ringdp can run here\n")


def test_the_checks_are_printed_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    checks = {check["what"]: check for check in found["checks"]}
    assert found["runs"]
    assert checks["cores"]["found"].startswith(f"{len(os.sched_getaffinity(0))} of ")
    assert all(
        check["well"] or check["advice"] or check["what"] == "GPUs" for check in found["checks"]
    )


def test_a_process_that_has_ended_but_was_not_reaped_is_passed_over(monkeypatch):
    """Only root may look at it, and its job may be the one that hangs."""
    looked = list[int]()
    monkeypatch.setattr(job, "segments", lambda pids: looked.extend(pids) or [])
    with subprocess.Popen(["true"]) as child:
        wait_until(lambda: has_ended(child.pid))
        job._communicators([os.getpid(), child.pid])
    assert looked == [os.getpid()]


@pytest.mark.parametrize(("needed", "code"), [(True, 1), (False, 0)])
def test_only_needed_checks_decide_the_exit_code(monkeypatch, capsys, needed, code):
    lacking = report.Check("[red]", "none", needed=needed, advice="get one")
    monkeypatch.setattr(report, "examine", lambda: [lacking])
    assert main(["doctor"]) == code
    assert re.match(r"(NO|-) +\[red\] +none\n +-> get one\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("cuda", "extra"), [("12.8", "cuda12]'"), ("13.0", "cuda13]'"), (None, "cuda13]' or 'ringdp[")]
)
def test_without_nccl_the_right_extra_is_named(monkeypatch, cuda, extra):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(report, "_libnccl", list)
    monkeypatch.setattr(report, "_version", lambda package: None)
    for check in (report.nccl(), report.cupy()):
        assert f"pip install 'ringdp[{extra}" in check.advice


def test_a_binding_to_nccl_that_cannot_be_imported_is_reported(monkeypatch, tmp_path):
    """`cupy.cuda.nccl` can be imported all the same."""
    (tmp_path / "cupy").mkdir()
    for file, text in (
        ("cupy/__init__.py", ""),
        ("cupy/cuda.py", "nccl = None"),
        ("cupy_backends.py", "raise ImportError('no such symbol')"),
    ):
        (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.setattr(report, "_version", lambda package: "14.0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = report.cupy()
    assert not check.well
    assert check.found.endswith("libs.nccl` fails: ImportError: no such symbol")


@pytest.mark.skipif(LACKS_HOST_NCCL, reason=WHY)
def test_a_binding_to_nccl_is_well_without_a_real_nccl():
    assert report.cupy().well


@pytest.mark.parametrize(
    ("script", "found", "well"),
    [
        ("", "fails: Exec format error", False),
        ("#!/bin/sh\necho cannot start >&2; exit 1\n", "fails: cannot start", False),
        ("#!/bin/sh\nexec sleep 600\n", "hangs", False),
        ("#!/bin/sh\nprintf '\\n\\377 1.2\\n'\n", "\ufffd 1.2", True),
    ],
    ids=["no program", "fails", "hangs", "no UTF-8"],
)
def test_a_compiler_may_be_anything(monkeypatch, tmp_path, script, found, well):
    compiler = tmp_path / "c++"
    compiler.write_text(script, encoding="utf-8")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", f"{compiler} -O2")  # CMake, too, accepts arguments
    monkeypatch.setattr(report, "SECONDS", 0.2 if found == "hangs" else report.SECONDS)
    check = report.compiler()
    assert check.found.endswith(found)
    assert check.well == well


def test_a_compiler_may_be_called_through_another_program(monkeypatch):
    monkeypatch.setenv("CXX", "env g++")  # as "ccache g++"
    assert report.compiler().found.startswith("g++ ")
    monkeypatch.setenv("CXX", "env no-such-compiler")
    assert not report.compiler().well


def test_gpus_without_a_working_cuda_are_reported(monkeypatch):
    def fails(device):
        raise RuntimeError("CUDA unknown error\nmore")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", fails)
    assert report.gpus().found == "2, but CUDA fails: CUDA unknown error"
    assert not report.gpus().well


def test_a_full_dev_shm_is_reported(monkeypatch):
    monkeypatch.setattr(report.shutil, "disk_usage", lambda _: Mock(total=1 << 40, free=0))
    check = report.shm_directory()
    assert (check.found, check.well) == ("0 MiB free", False)


def test_processes_may_have_any_name():
    """The kernel cuts a name after 15 bytes, here inside a character."""
    before = Path("/proc/self/comm").read_bytes().rstrip()
    named = partial(ctypes.CDLL(None).prctl, PR_SET_NAME)
    named("тренировка".encode())
    try:
        assert process_state(os.getpid()) == ""
        assert os.getpid() in family(os.getppid())
    finally:
        named(before)


def rank_0_waits(comm: Communicator, path: str) -> None:
    while comm.rank == 1 and not Path(path).exists():
        time.sleep(0.01)
    comm.all_reduce(torch.ones(100), tag=5)


def arrive(comm: Communicator) -> None:
    comm.barrier()


@pytest.fixture
def waiting_pool(fresh_ranks, tmp_path) -> Iterator[Pool]:
    """Two ranks: rank 0 waits for rank 1, which is in user code."""
    pool = fresh_ranks(2)  # with one communicator
    pool(arrive)  # otherwise its ranks might still be connecting
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(pool, rank_0_waits, str(tmp_path / "go"))
        try:
            while not any(watched.record(0).waits_for == 1 for watched in views(pool)):
                assert not job.done(), job.exception()
                time.sleep(0.01)
            yield pool
        finally:
            (tmp_path / "go").touch()
        job.result()


def views(pool: Pool) -> list[Watched]:
    return [Watched(path) for path in segments([pool.processes[0].pid])]


def test_a_running_job_is_shown_and_continues(waiting_pool, capsys):
    for process in waiting_pool.processes:
        assert main(["doctor", "--pid", str(process.pid)]) == 0
        shown = capsys.readouterr().out.splitlines()
        number = re.match(r"collective #(\d+): rank 1 has not called it$", shown[1])[1]
        call = rf"all_reduce #{number} \(float32, sum\) of 100  5 .* rank 1 .*/test_doctor.py:\d+ "
        assert re.match(rf"0 +{call}", shown[3])
        assert re.match(r"1 +user code  ", shown[4])


def test_a_job_is_found_by_its_parent_process(waiting_pool, capsys):
    assert main(["doctor", "--job", str(os.getpid())]) == 0
    assert "rank 1 has not called it" in capsys.readouterr().out
    assert main(["doctor", "--job", "no such run"]) == 2
    assert "neither a process nor the --rdzv-id" in capsys.readouterr().err


@contextmanager
def in_environment(environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env=environ | {"PATH": os.environ["PATH"]}) as process:
        try:
            # The environment appears in /proc a little after exec has closed Popen's pipe.
            while not Path(f"/proc/{process.pid}/environ").read_bytes():
                time.sleep(0.001)
            yield process
        finally:
            process.kill()


SITE = b"train.py:40".ljust(SITE_BYTES, b"\0")
RUN = f"run {os.getpid()}"  # a run id of no other process of this machine


@pytest.fixture
def without_shared_memory(
    store_client,
) -> Iterator[tuple[TCPStore, PrefixStore, subprocess.Popen[bytes]]]:
    """The job's store, a communicator's part of it, and a process with a rank's environment.

    Of two ranks without shared memory the first one waits; both have published their last state.
    """
    server = loopback_store()
    job = PrefixStore(f"ringdp/{RUN}/0", server)
    for k, line in enumerate(["", "1 x", "2 0", "1.1 2"], 1):  # only the last one is well-formed
        job.set(f"communicators/{k}", line)
    job.add("communicators", 5)
    one = PrefixStore("1.1", job)
    ranks = [StatusBoard(store_client(one), rank, 2) for rank in range(2)]
    call = 0, fingerprint("all_reduce", torch.float32, "sum", 0), 10, SITE
    ranks[0].calls[0], ranks[0].begun = (call, time.monotonic()), 1
    ranks[0].waits(1, 1)
    for k, rank in enumerate(ranks):
        introduce(one, k)
        rank.publish_last()
    environ = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": RUN}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    with in_environment(environ) as process:
        yield server, one, process


def test_ranks_without_shared_memory_are_shown(without_shared_memory, capsys):
    server, one, process = without_shared_memory
    for which in (["--pid", str(process.pid)], ["--job", RUN]):
        assert main(["doctor", *which]) == 0
        heading, verdict, _, first, second = capsys.readouterr().out.splitlines()
        at = f"the store at 127.0.0.1:{server.port}, as 1.1"
        pid = os.getpid()  # has introduced both
        assert heading == f"communicator 1 of 1, at {at}: 2 ranks, of processes {pid}, {pid}"
        assert verdict == "collective #0: rank 1 has not called it"
        call = r"all_reduce #0 \(float32, sum\) of 10  1      rank 1     \d+\.\d s  train.py:40"
        assert re.match(rf"0     {call}  none$", first)
        assert re.match(r"1     user code  .* none$", second)
    one.set("failed", "1 1 0 0 0 0 0 0 0\n")
    assert main(["doctor", "--pid", str(process.pid)]) == 0
    assert "it has failed: lost, rank 1" in capsys.readouterr().out
    for rank in range(2):
        one.set(f"closed/{rank}", "1")
    assert main(["doctor", "--pid", str(process.pid)]) == 2
    assert "holds no communicator of ringdp open" in capsys.readouterr().err


@pytest.mark.parametrize("silent", [False, True])
def test_an_unreachable_store_is_reported_in_one_line(monkeypatch, capsys, silent):
    monkeypatch.setattr(inspection, "TIMEOUT", timedelta(milliseconds=50))
    taken = socket.socket()  # bound, so no other process gets the port
    taken.bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    if silent:
        taken.listen()
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with taken, in_environment(environ) as process:
        assert main(["doctor", "--pid", str(process.pid)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert f"at the store at 127.0.0.1:{port}: rank 0 cannot reach rank 0's store" in line
    assert ("has given no answer" if silent else "Connection refused") in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pid", "4194305"], "there is no process 4194305"),  # above the largest pid
        (["--pid", "-3"], "there is no process -3"),
        (["--pid", str(os.getppid())], "holds no communicator of ringdp open"),
        (["--job", "4194305"], "'4194305' is neither a process nor the --rdzv-id"),
        (["--job", "²"], "'²' is neither a process nor the --rdzv-id"),
        (["--job", ""], "'' is neither a process nor the --rdzv-id"),
        (["--job", "9" * 5000], "99' is neither a process nor the --rdzv-id"),
        (["--json", "--pid", "1"], "takes one of"),
    ],
    ids=[
        "no process",
        "no number of one",
        "no rank",
        "no job",
        "no number",
        "empty",
        "long",
        "too much",
    ],
)
def test_bad_arguments_are_refused_in_one_line(refused, arguments, message):
    refused("doctor", *arguments, message=message)
