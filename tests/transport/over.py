"""Runs a function of rank processes with a communicator over another transport than the pool's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import ringdp
from ringdp import Communicator
from ringdp.cli.gpus import SOCKETS
from ringdp.comm import rendezvous
from tests.forks import CALL_TIMEOUT


def over(comm: Communicator, transport: str, function: Callable[..., Any], *arguments: Any) -> Any:
    other = ringdp.init(transport=transport, timeout=CALL_TIMEOUT)
    rendezvous._world = comm  # which the tests after this one use
    result = function(other, *arguments)
    comm.barrier()  # else a rank that is done would be lost to one that is not
    other.close()
    return result


def over_gpu(
    comm: Communicator,
    transport: str,
    timeout: float,
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """On GPU 0, which both of two ranks use: for NCCL as if they were two hosts."""
    os.environ |= SOCKETS | {"NCCL_HOSTID": f"ringdp-{comm.rank}"}
    torch.cuda.set_device(0)
    other = ringdp.init(transport=transport, timeout=timeout)
    rendezvous._world = comm
    result = function(other, *arguments)
    torch.cuda.synchronize()
    comm.barrier()
    other.close()
    return result
