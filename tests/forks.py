"""Ranks that may die: forked from a process that has imported everything, in 0.1 s or so per job.

    forks(3, function, *arguments) -> [Ended(code, reported) of rank 0, ...]

calls `function(comm, report, *arguments)` on every rank; `function` is a module-level function of a
test file. What a rank passes to `report` is in `reported`, however the rank ended. A test whose
whole body runs on such ranks, none of which may fail, is written as with tests/ranks.py:

    @on_ranks(3, pool="forked")
    def test_it(comm, parameter): ...
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from torch.distributed import TCPStore

from ringdp import Communicator
from ringdp.cli.loopback import environment, loopback_store
from tests.ranks import SERVER, named

Report = Callable[[Any], None]

HANG = "hangs"  # the code of a rank that had to be killed
CALL_TIMEOUT = 60.0  # seconds that a call may take on a busy machine
LIFETIME = 10 * CALL_TIMEOUT  # seconds until a rank counts as hanging


class Ended(NamedTuple):
    """How a rank ended: its exit code (negative: a signal) and what it reported."""

    code: int | str
    reported: list[Any]


class Forks:
    """Forks the ranks of one job after another from its own process; made once per session."""

    def __init__(self) -> None:
        self.pipe, there = SERVER.Pipe()
        self.process = SERVER.Process(target=main, args=(there,))
        self.process.start()
        there.close()

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Ended]:
        job_store = loopback_store()
        self.pipe.send((sys.path, size, job_store.port, *named(function), arguments))
        ended: list[Ended] = self.pipe.recv()
        return ended

    def succeed(self, size: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls `function(comm, *arguments)`, which must not raise."""
        ended = self(size, report_errors, function, *arguments)
        errors = sorted(error for rank in ended for error in rank.reported)
        assert [rank.code for rank in ended] == [0] * size, "\n".join(text for _, text in errors)

    def close(self) -> None:
        self.pipe.close()
        self.process.join(CALL_TIMEOUT)
        self.process.kill()


def report_errors(
    comm: Communicator, report: Report, function: Callable[..., Any], *arguments: Any
) -> None:
    """`function` was unpickled, and so its module imported, once for all ranks."""
    try:
        function(comm, *arguments)
    except BaseException:  # as pytest.fail's
        report((time.monotonic(), f"rank {comm.rank} raised:\n{traceback.format_exc()}"))
        raise


def store() -> TCPStore:
    """On a rank: a client of its job's store, to communicate without the communicator."""
    return TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


def meet(comm: Communicator, what: str, without: int | None = None) -> None:
    """On a rank: returns once every rank, except `without`, has come here; `what` is used once."""
    talk = store()
    talk.set(f"{what}/{comm.rank}", "")
    talk.wait([f"{what}/{rank}" for rank in range(comm.size) if rank != without])


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:], size, port, module, name, arguments = pipe.recv()
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name)  # imported once for all ranks
        os.environ |= environment(port, size)
        # otherwise a rank's last collection would write to, and so copy, all inherited pages
        gc.freeze()
        pipe.send(job(size, function, arguments))


def job(size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Ended]:
    ranks: dict[int, Connection] = {}  # by pid, in rank order
    for rank in range(size):
        reader, writer = Pipe(duplex=False)
        if not (pid := os.fork()):
            be_rank(rank, function, writer, arguments)
        writer.close()
        ranks[pid] = reader
    reported: dict[int, list[Any]] = {pid: [] for pid in ranks}
    codes: dict[int, int | str] = {}
    deadline = time.monotonic() + LIFETIME
    while len(codes) < size:
        for pid in ranks.keys() - codes.keys():
            # before the pipe is read, so that nothing is left in it afterwards
            ended, status = os.waitpid(pid, os.WNOHANG)
            drain(ranks[pid], reported[pid])
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = HANG
        time.sleep(0.002)
    return [Ended(codes[pid], reported[pid]) for pid in ranks]


def drain(pipe: Connection, messages: list[Any]) -> None:
    try:
        while pipe.poll():
            messages.append(pipe.recv())
    except (EOFError, OSError):
        return  # the rank has reported all, or was killed while it wrote


def be_rank(
    rank: int, function: Callable[..., Any], pipe: Connection, arguments: tuple[Any, ...]
) -> NoReturn:
    import torch

    import ringdp

    # after a fork torch makes a new thread pool, and fails if two threads do it at once
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    function(ringdp.init(timeout=CALL_TIMEOUT, warn_after=CALL_TIMEOUT), pipe.send, *arguments)
    atexit._run_exitfuncs()
    os._exit(0)  # the interpreter's own shutdown takes longer than the whole job
