"""Runs one function in n pinned processes, as the ranks of a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from ringdp.cli.loopback import environment, loopback_store


def run(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(*arguments)` on every rank, with torchrun's variables; return rank 0's result.

    `function` must be importable, and its arguments picklable. If a rank raises, all end, and its
    error is raised here.
    """
    store = loopback_store()
    said: SimpleQueue[Any] = processes.get_context("spawn").SimpleQueue()
    started = processes.spawn(
        _rank, (ranks, store.port, said, function, arguments), nprocs=ranks, join=False
    )
    while said.empty():  # read before the ranks end: a pipe holds little
        if started.join(timeout=0.1):
            break
    if said.empty():
        raise RuntimeError(f"of {ranks} ranks all ended, and rank 0 said nothing")
    found = said.get()
    while not started.join():
        pass
    return found


def _rank(
    rank: int,
    ranks: int,
    port: int,
    said: SimpleQueue[Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))  # one per rank, while there are enough
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ |= environment(port, ranks, rank)
    found = function(*arguments)
    if rank == 0:
        said.put(found)
    if dist.is_initialized():  # else gloo's threads may abort the process as it ends
        dist.destroy_process_group()
