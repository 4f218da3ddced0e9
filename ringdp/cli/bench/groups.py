"""The contenders' processes: one group per contender, alive for the whole run.

    start ──► saying hello ──► sleeping ◄──► in a round ──► ended

One process imports torch once, and forks a process per group, which forks the group's ranks; MPI
libraries launch theirs. Each rank connects to its group's socket and says who it is; pipes would
not do, because MPI launchers give only rank 0 a standard input. A rank that fails or dies ends the
run with a RankError. However the run ends, every process is gone when the context of `groups` is
left.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from ringdp.cli.bench import peers, worker
from ringdp.cli.bench.contenders import FOLDER, Failure, Hello, Round, Times
from ringdp.cli.launch import RankError, fork, room_for_sockets, serve_forks, signals_held
from ringdp.cli.loopback import environment, loopback_store

START_TIMEOUT = 180.0  # s: many ranks import on few cores
ROUND_TIMEOUT = 600.0  # s: only a hang reaches it
GRACE = 10.0  # s for ranks to end by themselves
HURRY = 3.0  # s for the same after a failure: some ranks may wait for a dead one
LAST_WORDS = 1.0  # s from SIGTERM to SIGKILL


@contextmanager
def groups(
    names: Sequence[str], ranks: int, cores: Sequence[int], largest: int, *, pin: bool = True
) -> Iterator[dict[str, Group]]:
    """Start all groups, and yield them by name. `largest` is that of the buffers, in bytes. `pin`:
    each rank to one of the cores."""
    serve_forks(["__main__", worker.__name__])
    fork(bool).join()  # waits for its imports, while signals are raised; from now on forks are fast
    with room_for_sockets():
        directory = tempfile.TemporaryDirectory(prefix=FOLDER)
    started: dict[str, Group] = {}
    grace = HURRY
    with directory as place:
        try:
            for name in names:
                size = probe_ranks(ranks, len(cores)) if name == "probe" else ranks
                with signals_held():
                    started[name] = Group(name, size, cores, largest, Path(place), pin=pin)
            for group in started.values():
                group.await_hello()
            yield started
            grace = GRACE
        finally:
            deadline = time.monotonic() + grace
            for group in started.values():
                group.ask_to_end()
            for group in started.values():
                group.end(deadline)


def probe_ranks(ranks: int, cores: int) -> int:
    return min(ranks, cores)


class Group:
    """The ranks of one contender, and the process that started them."""

    def __init__(
        self,
        name: str,
        ranks: int,
        cores: Sequence[int],
        largest: int,
        directory: Path,
        *,
        pin: bool,
    ) -> None:
        self.name, self.ranks, self.version, self._settings = name, ranks, "", ""
        self._log = (directory / f"{name}.log").open("wb")
        self._pipes: dict[int, Connection] = {}
        self._pids: list[int] = []
        address = str(directory / name)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address)
        self._socket.listen(ranks)
        places = ",".join(map(str, cores)) if pin else ""
        given = name, address, places
        # Each is in a new session: Ctrl-C reaches the controller alone, which ends the ranks.
        self._launcher: subprocess.Popen[bytes] | ForkServerProcess
        if name in peers.MPIS:
            launch = peers.launch(name, ranks, len(cores))
            self._settings = f"; {launch.settings}"
            shared = {"OMP_NUM_THREADS": "1", "TMPDIR": str(directory)} | launch.environment
            self._launcher = subprocess.Popen(
                [*launch.command, sys.executable, "-m", worker.__name__, *given],
                env=os.environ | shared,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            self._store = loopback_store()
            shared = {"TMPDIR": str(directory)} | environment(self._store.port, ranks)
            self._launcher = fork(worker.fork_ranks, *given, ranks, largest, shared, self._log.name)

    def await_hello(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while len(self._pipes) < self.ranks:
            if not wait([self._socket], 0.1):
                self._check_started(deadline)
                continue
            accepted, _ = self._socket.accept()
            pipe: Connection = Connection(accepted.detach())
            while not pipe.poll(0.1):
                self._check_started(deadline)
            hello = self._receive(pipe, "as it started")
            assert isinstance(hello, Hello)
            self._pipes[hello.rank] = pipe
            self._pids.append(hello.pid)
            self.version = hello.version + self._settings
        self._socket.close()

    def run(self, command: Round) -> list[Times]:
        """Run one round while all other groups sleep; return each rank's times."""
        self._tell(command)
        waiting = {pipe: rank for rank, pipe in self._pipes.items()}
        deadline = time.monotonic() + ROUND_TIMEOUT
        times: dict[int, Times] = {}
        what = f"in {command.task.collective} of {command.task.count} {command.task.dtype}"
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = f"ranks {sorted(waiting.values())} {what}: no end in {ROUND_TIMEOUT} s"
                raise self._error(f"{self.name}: {late}")
            for pipe in [p for p in waiting if p in ready]:
                found = self._receive(pipe, what)
                assert isinstance(found, Times)
                times[waiting.pop(pipe)] = found
        return [times[rank] for rank in range(self.ranks)]

    def ask_to_end(self) -> None:
        """Tell the ranks to end after their round, and signal any that have not connected yet."""
        self._socket.close()
        self._tell(None)
        if len(self._pipes) < self.ranks:
            self._signal(signal.SIGTERM)

    def end(self, deadline: float) -> None:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            self._join(max(0.0, deadline - time.monotonic()))
            self._signal(signum)
            deadline = time.monotonic() + LAST_WORDS
        self._join()
        for pipe in self._pipes.values():
            pipe.close()
        self._log.close()

    def _tell(self, command: Round | None) -> None:
        for pipe in self._pipes.values():
            with suppress(BrokenPipeError, ConnectionResetError):  # `_receive` reports the death
                pipe.send(command)

    def _signal(self, signum: int) -> None:
        """Signal a launcher that still runs, its process group, and ranks in other sessions."""
        launcher = self._launcher.pid
        if self._code() is not None or launcher is None:
            return
        with suppress(ProcessLookupError):
            os.kill(launcher, signum)  # first: it may not lead its group yet, and then has no ranks
            os.killpg(launcher, signum)
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _code(self) -> int | None:
        """The launcher's exit code, or None while it runs."""
        it = self._launcher
        return it.poll() if isinstance(it, subprocess.Popen) else it.exitcode

    def _join(self, seconds: float | None = None) -> None:
        it = self._launcher
        with suppress(subprocess.TimeoutExpired):
            it.wait(seconds) if isinstance(it, subprocess.Popen) else it.join(seconds)

    def _receive(self, pipe: Connection, what: str) -> Any:
        try:
            found = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._error(f"a rank of {self.name} died {what}") from None
        if isinstance(found, Failure):
            raise self._error(f"a rank of {self.name} failed {what}", found.traceback)
        return found

    def _check_started(self, deadline: float) -> None:
        code = self._code()
        if code is not None or time.monotonic() > deadline:
            how = f"said nothing for {START_TIMEOUT} s" if code is None else f"exited with {code}"
            raise self._error(f"{self.name} did not start: it {how}")

    def _error(self, why: str, traceback: str = "") -> RankError:
        """An error that begins with the output of its processes, which may say why."""
        said = Path(self._log.name).read_text(errors="replace", encoding="utf-8")
        return RankError(f"{said}{traceback}ringdp: {why}")
