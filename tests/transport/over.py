"""Runs a function on rank processes with a communicator over another transport than the pool's."""

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


def init_over(comm: Communicator, transport: str, timeout: float = CALL_TIMEOUT) -> Communicator:
    """A communicator over the transport. The pool's, `comm`, stays the default for the next
    tests, and is aborted together with it."""
    other = ringdp.init(transport=transport, timeout=timeout)
    rendezvous._world = comm
    comm._children.add(other)
    return other


def over(comm: Communicator, transport: str, function: Callable[..., Any], *arguments: Any) -> Any:
    other = init_over(comm, transport)
    result = function(other, *arguments)
    comm.barrier()  # otherwise a rank that is still in it would report this rank lost
    other.close()
    return result


def over_gpu(
    comm: Communicator,
    transport: str,
    timeout: float,
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Like `over`, with both ranks on GPU 0; NCCL takes them for two hosts."""
    os.environ |= SOCKETS | {"NCCL_HOSTID": f"ringdp-{comm.rank}"}
    torch.cuda.set_device(0)
    other = init_over(comm, transport, timeout)
    result = function(other, *arguments)
    torch.cuda.synchronize()
    comm.barrier()
    other.close()
    return result
