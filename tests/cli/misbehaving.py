"""`ringdp train` with ranks that misbehave: `python misbehaving.py ENTRY`, run as a process."""

import os
import signal
import struct
import sys
import time
from collections.abc import Callable

from rich.console import Console

import ringdp
from ringdp.cli import launch
from ringdp.cli.exits import exit_code
from ringdp.cli.options import Options
from ringdp.cli.runs import Job, Progress, Record
from ringdp.cli.train import run

Emit = Callable[[Progress], None]

OPTIONS = Options(steps=1, reference=False)


def _running(emit: Emit) -> int:
    emit(Progress(f"pid {os.getpid()}", 1, 1, 0.0, 0.0, {}))
    return int(os.environ["RANK"])


def raises(job: Job, emit: Emit) -> list[Record]:
    comm = ringdp.init()
    _running(emit)
    comm.barrier()  # both have said so
    if comm.rank == 1:
        raise ValueError("the cause, on rank 1")
    time.sleep(3600)
    return []


def raises_then_peer_lost(job: Job, emit: Emit) -> list[Record]:
    """Rank 0 waits for rank 1 in a collective, and may die of its failure."""
    comm = ringdp.init()
    _running(emit)
    comm.barrier()
    if comm.rank == 1:
        raise ValueError("the cause, on rank 1")
    comm.barrier()
    return []


def killed(job: Job, emit: Emit) -> list[Record]:
    if _running(emit) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)
    return []


def leaves(job: Job, emit: Emit) -> list[Record]:
    """Rank 1, as if it were done, but without a result."""
    if _running(emit) == 1:
        os._exit(0)
    time.sleep(3600)
    return []


def killed_then_peer_lost(job: Job, emit: Emit) -> list[Record]:
    """Rank 0 notices rank 1's death when the launcher has asked it to end already."""
    launch.LAST_WORDS = 20.0  # a busy machine is slow
    comm = ringdp.init()
    comm.barrier()
    if _running(emit) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    comm.barrier()
    return []


def sleeps(job: Job, emit: Emit) -> list[Record]:
    _running(emit)
    time.sleep(3600)
    return []


def talks(job: Job, emit: Emit) -> list[Record]:
    ringdp.init().barrier()
    while True:
        _running(emit)


def killed_while_it_talks(job: Job, emit: Emit) -> list[Record]:
    """Rank 1, inside an event. What rank 0 says of it comes later."""
    launch.LAST_WORDS = 20.0  # a busy machine is slow
    comm = ringdp.init()
    comm.barrier()
    if comm.rank == 1:
        os.write(emit.__self__.fileno(), struct.pack("!i", 1000) + b"the first of 1000 bytes")
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    return []


if __name__ == "__main__":
    import misbehaving  # by this name, which the ranks can import too

    launch._MODULES = ["__main__"]  # no rank makes an optimizer, whose imports take seconds
    entry = getattr(misbehaving, sys.argv[1])
    sys.stdout.reconfigure(encoding="utf-8")  # else the locale's, which may lack ×
    sys.exit(exit_code(lambda: run(OPTIONS, Console(), entry=entry)))
