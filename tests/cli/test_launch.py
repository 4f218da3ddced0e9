"""Ranks that fail, die or are interrupted: the message, the exit code, and that no process is
left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from ringdp.cli import launch
from ringdp.cli.doctor.job import parents
from ringdp.cli.exits import exit_code
from ringdp.cli.launch import Entry, RankError, SignalError, signals_raised
from ringdp.cli.main import main
from ringdp.cli.runs import Job, Record
from ringdp.cli.train import run
from ringdp.transport.store.processes import has_ended
from tests.cli.conftest import SECONDS, processes
from tests.cli.misbehaving import (
    OPTIONS,
    exits_without_result,
    killed,
    killed_then_peer_lost,
    killed_while_it_talks,
    raises,
    raises_then_peer_lost,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("misbehaving.py")


@pytest.fixture(scope="module")
def misbehaving(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """misbehaving(entry): a process whose ranks run that entry of misbehaving.py, once.

    All are started at the beginning, since starting takes long and uses one core each. TMPDIR is
    too long for names of sockets, which must work all the same, or the test session's folder.
    """
    long, short = tmp_path_factory.mktemp("x" * 110), tmp_path_factory.getbasetemp()
    with processes() as start:
        started = [
            (entry, place, start("env", f"TMPDIR={place}", sys.executable, str(SCRIPT), entry))
            for entry, place in [("talks", long), *[("sleeps", long)] * 2, ("sleeps", short)]
        ]

        def take(wanted: str, where: Path = long) -> subprocess.Popen[str]:
            asked = wanted, where
            number = next(i for i, (*found, _) in enumerate(started) if (*found,) == asked)
            return started.pop(number)[2]

        yield take


def await_ranks(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of both ranks, once they run."""
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, f"ended before its ranks ran: {process.communicate()[1]}"
        pids += [int(found) for found in re.findall(r"pid (\d+)", line)]
    return pids


def group_of(leader: int) -> list[int]:
    """Living processes of the leader's group: ranks, and helpers of multiprocessing."""
    found = []
    for pid, _ in parents():
        with suppress(ProcessLookupError):  # it has ended
            if os.getpgid(pid) == leader and not has_ended(pid):
                found.append(pid)
    return found


def assert_gone(process: subprocess.Popen[str], pids: list[int]) -> None:
    assert all(map(has_ended, pids))
    wait_until(lambda: not group_of(process.pid), SECONDS)


def stderr_of(entry: Entry[Job, list[Record]], capfd: pytest.CaptureFixture[str]) -> str:
    """The stderr of a run that fails; asserts that all of its ranks have ended."""
    assert exit_code(lambda: run(OPTIONS, Console(), entry=entry)) == 1
    out, stderr = capfd.readouterr()
    pids = [int(found) for found in re.findall(r"pid (\d+)", out)]
    assert pids, "no rank has run"
    assert all(map(has_ended, pids))
    return stderr


@pytest.mark.parametrize("entry", [raises, raises_then_peer_lost])
def test_the_cause_is_printed_first(
    entry: Entry[Job, list[Record]], capfd: pytest.CaptureFixture[str]
) -> None:
    stderr = stderr_of(entry, capfd)
    assert stderr.startswith("Traceback (most recent call last):")
    assert stderr.index("ValueError: the cause, on rank 1") < stderr.index("rank 1 raised")


def test_a_killed_rank_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        stderr_of(killed, capfd) == "ringdp: rank 1 was killed by SIGKILL; every rank has ended\n"
    )


def test_a_rank_that_ends_without_a_result_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        stderr_of(exits_without_result, capfd)
        == "ringdp: rank 1 exited with 0; every rank has ended\n"
    )


@pytest.mark.parametrize("lost", [EOFError, BrokenPipeError])
def test_a_fork_server_that_ends_is_an_error(monkeypatch, capfd, lost: type[Exception]) -> None:
    """Its EOFError is Ctrl-D to typer, and a broken pipe of standard output is no error."""

    def start(_: object) -> None:
        raise lost

    monkeypatch.setattr(ForkServerProcess, "start", start)
    assert main(["train", "--steps", "1", "--no-reference"]) == 1
    message = "ringdp: the process that forks the ranks has ended; every rank has ended\n"
    assert capfd.readouterr().err == message


def test_a_lost_peer_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    assert re.search("PeerLost: .*rank 1 has ended", stderr_of(killed_then_peer_lost, capfd))


def test_a_death_is_named_even_if_an_error_that_it_caused_is_read_first() -> None:
    """As by a launcher that is slow, and still has events to read of the rank that was killed."""
    lost = launch._Failure(lost_peer=True, at=0.0, traceback="PeerLost: rank 0 has ended")
    pipes = {}
    for rank, sent in enumerate([["event", "event"], [lost]]):
        reader, writer = Pipe(duplex=False)
        for what in sent:
            writer.send(what)
        writer.close()
        pipes[reader] = rank
    processes: list[Any] = [Mock(exitcode=-signal.SIGKILL), Mock(exitcode=1)]
    with pytest.raises(RankError, match=r"^ringdp: rank 0 was killed by SIGKILL; .*\nPeerLost: "):
        launch._results(pipes, processes, lambda event: None)


def test_errors_are_read_after_a_rank_was_killed_in_an_event(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert re.search("PeerLost: .*rank 1 has ended", stderr_of(killed_while_it_talks, capfd))


def test_a_closed_output_ends_every_rank(misbehaving) -> None:
    process = misbehaving("talks")
    pids = await_ranks(process)
    process.stdout.close()
    assert process.wait(SECONDS) == 1
    assert process.stderr.read() == ""
    assert_gone(process, pids)


@pytest.mark.parametrize("to_group", [True, False], ids=["group", "parent"])
def test_an_interrupt_ends_every_rank(misbehaving, to_group: bool) -> None:
    process = misbehaving("sleeps")
    pids = await_ranks(process)
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert stderr == "ringdp: ended by SIGINT; every rank has ended\n"
    assert_gone(process, pids)


def test_ranks_end_with_a_launcher_that_is_killed(misbehaving, tmp_path_factory) -> None:
    place = tmp_path_factory.getbasetemp()
    process = misbehaving("sleeps", place)
    await_ranks(process)
    assert [*place.glob("pymp-*")]
    process.kill()
    process.wait(SECONDS)
    assert_gone(process, [])
    assert not [*place.glob("pymp-*")]


def test_an_interrupt_during_the_start_ends_every_rank(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start(sys.executable, str(SCRIPT), "sleeps")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Learning ")
    time.sleep(0.3)  # the first rank waits for the fork server, which is importing
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert stderr == "ringdp: ended by SIGINT; every rank has ended\n"
    assert_gone(process, [])


def test_the_command_ends_the_process_that_forks_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it still imports what they need."""
    server: Any = forkserver.ForkServer()
    server.set_forkserver_preload(["torch._dynamo"])
    server.ensure_running()
    pid = server._forkserver_pid
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(sys, "argv", ["ringdp", "--version"])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main() == 0
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_signal_is_no_error_that_a_library_may_handle() -> None:
    """As torch does where it tries an import: the run would go on, and ignore further signals."""
    with pytest.raises(SignalError), signals_raised(), suppress(Exception):
        signal.raise_signal(signal.SIGTERM)


def test_an_ignored_signal_stays_ignored() -> None:
    """As SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raised():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
