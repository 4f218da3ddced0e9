"""`ringdp train` with ranks that misbehave: `python misbehaving.py ENTRY` runs one of them."""

import errno
import os
import signal
import struct
import sys
import time

from rich.console import Console

import ringdp
from ringdp.cli import launch
from ringdp.cli.exits import exit_code
from ringdp.cli.options import Options
from ringdp.cli.runs import Emit, Job, Progress, Record, run_stages
from ringdp.cli.train import run
from ringdp.tape import parts

OPTIONS = Options(steps=1, reference=False)


def _sleep() -> list[Record]:
    """Until the launcher asks this rank to end, about which it has nothing to say."""
    launch.LAST_WORDS = 0.0
    time.sleep(3600)
    return []


def _running(emit: Emit) -> int:
    emit(Progress(f"pid {os.getpid()}", 1, 1, 0.0, 0.0, {}))
    return int(os.environ["RANK"])


def raises(job: Job, emit: Emit) -> list[Record]:
    comm = ringdp.init()
    _running(emit)
    comm.barrier()  # both ranks have emitted their pid
    if comm.rank == 1:
        raise ValueError("the cause, on rank 1")
    return _sleep()


def raises_then_peer_lost(job: Job, emit: Emit) -> list[Record]:
    """Rank 0 waits for rank 1 in a collective, and may fail of its failure."""
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
    return _sleep()


def cannot_write_the_trace(job: Job, emit: Emit) -> list[Record]:
    """The disk is full once the runs are done."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    parts.merge = full
    return run_stages(job, emit)


def exits_without_result(job: Job, emit: Emit) -> list[Record]:
    """Rank 1 exits with code 0, but without a result."""
    if _running(emit) == 1:
        os._exit(0)
    return _sleep()


def killed_then_peer_lost(job: Job, emit: Emit) -> list[Record]:
    """Rank 0 notices rank 1's death after the launcher has already signalled it to end."""
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
    return _sleep()


def talks(job: Job, emit: Emit) -> list[Record]:
    ringdp.init().barrier()
    while True:
        _running(emit)


def killed_while_it_talks(job: Job, emit: Emit) -> list[Record]:
    """Rank 1 is killed in the middle of an event; rank 0's error comes later."""
    launch.LAST_WORDS = 20.0  # a busy machine is slow
    comm = ringdp.init()
    _running(emit)
    comm.barrier()
    if comm.rank == 1:
        os.write(emit.__self__.fileno(), struct.pack("!i", 1000) + b"the first of 1000 bytes")
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    return []


if __name__ == "__main__":
    import misbehaving  # the ranks can import it by this name

    launch._MODULES = ["__main__"]  # no rank makes an optimizer, whose imports take seconds
    entry = getattr(misbehaving, sys.argv[1])
    sys.stdout.reconfigure(encoding="utf-8")  # the locale's encoding may lack ×
    sys.exit(exit_code(lambda: run(OPTIONS, Console(), entry=entry)))
