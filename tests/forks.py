"""Ranks that may die: forked from one process that has imported everything, some 0.1 s a job.

    forks(3, function, *arguments) -> [Ended(code, said) of rank 0, ...]

runs `function(comm, say, *arguments)` on every rank, where `function` is a module-level function of
a test file. What a rank has passed to `say` is what it `said`, however it ended after that.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from torch.distributed import TCPStore

from ringdp.cli.loopback import environment, loopback_store
from tests.ranks import SERVER, named

Say = Callable[[Any], None]

HANG = "hangs"  # the code of a rank that did not end
PATIENCE = 60.0  # seconds that a call may take: a busy machine is slow
LIFETIME = 10 * PATIENCE  # seconds until a rank counts as one that hangs


class Ended(NamedTuple):
    """How a rank ended: its exit code, negative for a signal, and all that it said."""

    code: int | str
    said: list[Any]


class Forks:
    """Runs one job after the other below its process; made once for a test session."""

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

    def close(self) -> None:
        self.pipe.close()
        self.process.join(PATIENCE)
        self.process.kill()


def store() -> TCPStore:
    """In a rank: what its job has to talk over beside a communicator."""
    return TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


def main(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:], size, port, module, name, arguments = pipe.recv()
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name)  # once for all ranks
        os.environ |= environment(port, size)
        gc.freeze()  # else a rank that ends looks at, and so copies, all that it shares with this
        pipe.send(job(size, function, arguments))


def job(size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Ended]:
    ranks: dict[int, Connection] = {}  # by pid, in rank order
    for rank in range(size):
        reader, writer = Pipe(duplex=False)
        if not (pid := os.fork()):
            be_rank(rank, function, writer, arguments)
        writer.close()
        ranks[pid] = reader
    said: dict[int, list[Any]] = {pid: [] for pid in ranks}
    codes: dict[int, int | str] = {}
    deadline = time.monotonic() + LIFETIME
    while len(codes) < size:
        for pid in ranks.keys() - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)  # before the pipe, which it may fill
            listen(ranks[pid], said[pid])
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = HANG
        time.sleep(0.002)
    return [Ended(codes[pid], said[pid]) for pid in ranks]


def listen(pipe: Connection, words: list[Any]) -> None:
    try:
        while pipe.poll():
            words.append(pipe.recv())
    except (EOFError, OSError):
        return  # it said all, or was killed in the middle of a word


def be_rank(
    rank: int, function: Callable[..., Any], pipe: Connection, arguments: tuple[Any, ...]
) -> NoReturn:
    import torch

    import ringdp

    torch.set_num_threads(1)  # torch makes a fork its pool anew, and two threads at once would fail
    os.environ["RANK"] = str(rank)
    function(ringdp.init(timeout=PATIENCE, warn_after=PATIENCE), pipe.send, *arguments)
    atexit._run_exitfuncs()
    os._exit(0)  # the interpreter's own end takes longer than all of this
