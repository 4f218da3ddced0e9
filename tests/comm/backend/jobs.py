"""torch's default process group over the ranks of a forked job, see tests/forks.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ringdp import Communicator
from tests.forks import CALL_TIMEOUT, store


@contextmanager
def world(comm: Communicator, backend: str, name: str = "world") -> Iterator[dist.ProcessGroup]:
    """`name` must differ between the groups of one job, since gloo cannot use a store twice."""
    if dist.is_initialized():  # another test's, which ranks that are kept alive share
        dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"{name}/{backend}", store()),
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=CALL_TIMEOUT),
    )
    yield dist.group.WORLD
    dist.barrier()  # gloo's ranks must not leave before the others have received everything
    dist.destroy_process_group()
