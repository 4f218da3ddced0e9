"""Runs user scripts as torchrun would, in processes forked by the server of tests/ranks.py."""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch

from ringdp.cli.loopback import environment, loopback_store
from tests.ranks import SERVER

TIMEOUT = 600.0  # seconds; only a hang takes as long


def run(script: Path, ranks: int = 2) -> list[str]:
    """Returns what each rank printed; raises AssertionError with all output as soon as one fails.

    The script runs in its own directory. `ranks=0` runs one process without a launcher's
    environment variables.
    """
    store = loopback_store()
    environments = [
        environment(store.port, ranks, rank)
        | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        for rank in range(ranks)
    ] or [{}]
    outputs = [script.with_name(f"output-{rank}") for rank in range(len(environments))]
    processes = [
        SERVER.Process(target=_be_rank, args=(script, variables, file), daemon=True)
        for variables, file in zip(environments, outputs, strict=True)
    ]
    for process in processes:
        process.start()
    until, waiting = time.monotonic() + TIMEOUT, processes
    while waiting and time.monotonic() < until:
        wait([process.sentinel for process in waiting], until - time.monotonic())
        if any(process.exitcode for process in waiting):
            break  # as torchrun ends the others, which may wait for this one
        waiting = [process for process in waiting if process.exitcode is None]
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    texts = [file.read_text(encoding="utf-8") for file in outputs]
    assert codes == [0] * len(codes), f"exit codes {codes}\n" + "\n".join(texts)
    return texts


def _be_rank(script: Path, variables: dict[str, str], outputs: Path) -> None:
    with outputs.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(0.9 * TIMEOUT, file=sys.__stderr__)  # shows where a hang is
    os.environ |= variables
    torch.set_num_threads(1)  # torchrun sets OMP_NUM_THREADS=1
    os.chdir(script.parent)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
    atexit._run_exitfuncs()  # a forked process does not run these by itself
    sys.stdout.flush()
    os._exit(0)
