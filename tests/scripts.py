"""Users' scripts, run as torchrun runs them, in processes that are forked: see tests/ranks.py."""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import sys
from pathlib import Path

import torch

from ringdp.cli.loopback import environment, loopback_store
from tests.ranks import SERVER

PATIENCE = 600.0  # seconds; only a hang reaches it


def run(script: Path, ranks: int = 2) -> list[str]:
    """What each rank printed. An AssertionError with all of it where one fails.

    They run in the script's directory; with 0 ranks one process, which no launcher has started.
    """
    store = loopback_store()
    environments = [
        environment(store.port, ranks, rank)
        | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        for rank in range(ranks)
    ] or [{}]
    said = [script.with_name(f"said-{rank}") for rank in range(len(environments))]
    processes = [
        SERVER.Process(target=_be_rank, args=(script, variables, file), daemon=True)
        for variables, file in zip(environments, said, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    words = [file.read_text(encoding="utf-8") for file in said]
    assert codes == [0] * len(codes), f"exit codes {codes}\n" + "\n".join(words)
    return words


def _be_rank(script: Path, variables: dict[str, str], said: Path) -> None:
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(0.9 * PATIENCE, file=sys.__stderr__)  # where it hangs
    os.environ |= variables
    torch.set_num_threads(1)  # torchrun's OMP_NUM_THREADS
    os.chdir(script.parent)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
    atexit._run_exitfuncs()  # which a forked process would leave out
    sys.stdout.flush()
    os._exit(0)
