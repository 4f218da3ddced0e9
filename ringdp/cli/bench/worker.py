"""One rank of a contender: waits for rounds, rewrites inputs, times calls and checks results.

    python -m ringdp.cli.bench.worker CONTENDER SOCKET CORES

is a rank that an MPI library has launched; `fork_ranks` forks those of any other contender. CORES
are core numbers separated by commas. Before any thread starts, rank r pins itself to one of them, r
modulo their count; ranks on GPUs use all, and so do others if CORES is empty. Between rounds a rank
sleeps in a read, so that other contenders have the cores. If the controller dies, the read ends,
and so does the rank, which then removes the controller's directory.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Client, Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path

import torch

from ringdp.cli import gpus
from ringdp.cli.bench.cases import EVERY, Task, constant, pattern, wrong_constant, wrong_pattern
from ringdp.cli.bench.contenders import (
    FOLDER,
    Buffers,
    Contender,
    Failure,
    Hello,
    Ours,
    Probe,
    Round,
    Times,
    Torchs,
)
from ringdp.cli.bench.peers import MPIS
from ringdp.comm.rendezvous import TRANSPORTS

LAST_WORDS = 1.0  # s for the others to end, after a rank has ended with an error


def fork_ranks(
    name: str,
    address: str,
    cores: str,
    ranks: int,
    largest: int,
    environ: dict[str, str],
    log: str,
) -> None:
    """Fork that many ranks, whose buffers have at most `largest` bytes each. Returns in each rank,
    and in this process once all have ended. `environ`: more variables; `log`: a file for output."""
    os.setsid()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environ
    tempfile.tempdir = None  # as TMPDIR says
    if name == "probe":
        Probe.share(ranks, largest)
    if not _parent_of(ranks):
        be_rank(name, address, cores)
    elif (controller := parent_process()) is not None and not controller.is_alive():
        shutil.rmtree(get_temp_dir(), ignore_errors=True)  # multiprocessing's, of the controller


def _parent_of(ranks: int) -> bool:
    """Fork the ranks. Returns false in each rank, and true in the parent once all have ended."""
    pids = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            os.environ["RANK"] = str(rank)
            return False
        pids.append(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            time.sleep(LAST_WORDS)
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    return True


def be_rank(name: str, address: str, cores: str) -> None:
    try:
        _be_rank(name, address, cores)
    except ConnectionError:  # the controller was killed, and cannot remove its directory
        if (place := Path(address).parent).name.startswith(FOLDER):
            shutil.rmtree(place, ignore_errors=True)


def _be_rank(name: str, address: str, cores: str) -> None:
    rank = rank_of(name)
    choice = [int(core) for core in cores.split(",") if core]
    if choice and name not in gpus.CONTENDERS:  # NCCL's threads need further cores with sockets
        os.sched_setaffinity(0, {choice[rank % len(choice)]})
    torch.set_num_threads(1)
    with Client(address, "AF_UNIX") as pipe:
        try:
            contender = connect(name)
            gc.freeze()  # imported objects stay; scanning them takes 0.1 s in every collection
            pipe.send(Hello(rank, os.getpid(), contender.version))
            serve(contender, pipe)
            contender.close()
        except Exception:
            pipe.send(Failure(traceback.format_exc()))


def rank_of(name: str) -> int:
    """This process's rank. Other launchers' variables may come from the bench's environment."""
    return int(os.environ[MPIS[name].rank if name in MPIS else "RANK"])


def connect(name: str) -> Contender:
    if name in TRANSPORTS:
        return Ours(name)
    if name == "probe":
        return Probe()
    if name in MPIS:
        from ringdp.cli.bench.mpi import Mpi  # importing mpi4py starts MPI

        return Mpi()
    return Torchs(name)


def serve(contender: Contender, pipe: Connection) -> None:
    prepared: dict[Task, Buffers] = {}  # of one size; algorithms share them
    while True:
        command: Round | None = pipe.recv()
        if command is None:
            return
        key = replace(command.task, algorithm="")
        if any(key.count != other.count for other in prepared):
            prepared.clear()
        if key not in prepared:
            prepared[key] = buffers_of(contender, command.task)
        pipe.send(run(contender, command, prepared[key]))


def buffers_of(contender: Contender, task: Task) -> Buffers:
    case = EVERY[task.collective]
    taken = contender.input(task, case.takes(task.count, contender.ranks, contender.rank))
    if case.gives is None:
        return Buffers(taken, taken)
    count = case.gives(task.count, contender.ranks, contender.rank)
    return Buffers(taken, torch.empty(count, dtype=taken.dtype, device=taken.device))


def run(contender: Contender, command: Round, buffers: Buffers) -> Times:
    """Run a round: one untimed call, in round 0 on a pattern and checked, then timed calls on
    constants. The result of the last call is checked too.
    """
    task, rank, ranks = command.task, contender.rank, contender.ranks
    case = EVERY[task.collective]
    call, barrier = contender.call(task, buffers), contender.barrier
    if contender.device != "cpu":
        call, barrier = partial(gpus.ended, call), partial(gpus.ended, barrier)
    first = command.number * command.calls
    nanoseconds = []
    gc.collect()
    gc.disable()
    if command.number == 0:
        buffers.input.copy_(pattern(rank, len(buffers.input), task.dtype))
    barrier()
    call()
    wrong = (
        wrong_pattern(case, buffers.output.cpu(), task, rank, ranks) if command.number == 0 else 0
    )
    for number in range(first, first + command.calls):
        buffers.input.fill_(constant(rank, number))
        barrier()
        start = time.perf_counter_ns()
        call()
        nanoseconds.append(time.perf_counter_ns() - start)
    gc.enable()
    wrong += wrong_constant(case, buffers.output.cpu(), task, number, rank, ranks)
    return Times(nanoseconds, wrong)


if __name__ == "__main__":
    be_rank(*sys.argv[1:])
