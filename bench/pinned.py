"""Where a measured rank runs: with one thread, on a core of its own while there are enough."""

from __future__ import annotations

import os

import torch


def pin(rank: int) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
