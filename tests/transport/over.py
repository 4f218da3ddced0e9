"""Functions of rank processes that want a communicator over another transport than the pool's."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

import ringdp
from ringdp import Communicator
from ringdp.cli.bench.gpus import SOCKETS
from ringdp.comm import rendezvous
from tests.forks import PATIENCE

Function = Callable[..., Any]


def over(transport: str) -> Callable[[Function], Function]:
    """A decorator: called with a communicator over `transport` in place of the pool's."""

    def decorator(function: Function) -> Function:
        @wraps(function)
        def run(comm: Communicator, *arguments: Any) -> Any:
            other = ringdp.init(transport=transport, timeout=PATIENCE)
            rendezvous._world = comm  # which the tests after this one use
            result = function(other, *arguments)
            comm.barrier()  # else a rank that is done would be lost to one that is not
            other.close()
            return result

        return run

    return decorator


def over_gpu(transport: str, *, timeout: float) -> Callable[[Function], Function]:
    """The same on GPU 0, which both of two ranks use: for NCCL as if they were two hosts."""

    def decorator(function: Function) -> Function:
        @wraps(function)
        def run(comm: Communicator, *arguments: Any) -> Any:
            os.environ |= SOCKETS | {"NCCL_HOSTID": f"ringdp-{comm.rank}"}
            torch.cuda.set_device(0)
            other = ringdp.init(transport=transport, timeout=timeout)
            rendezvous._world = comm
            result = function(other, *arguments)
            torch.cuda.synchronize()
            comm.barrier()
            other.close()
            return result

        return run

    return decorator


over_gloo, over_nccl, over_peer = over("c10d"), over("nccl-host"), over("peer-host")
