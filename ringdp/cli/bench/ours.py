"""ringdp's communicator as a contender, over one of its transports.

NCCL refuses two ranks of one host on one GPU. Where there are fewer GPUs than ranks, each rank says
it is a host of its own; NCCL then goes over sockets: slow, and fair to all algorithms.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import cast

import torch

import ringdp
from ringdp.cli.bench.cases import Case, Task, torch_dtype
from ringdp.cli.bench.contender import Buffers, plain_buffers
from ringdp.comm import Communicator
from ringdp.comm.rendezvous import TransportName
from ringdp.transport.base import ReduceOp

SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}

CALLS: dict[str, Callable[[Communicator, Buffers, ReduceOp], Callable[..., object]]] = {
    "all_reduce": lambda c, b, op: partial(c.all_reduce, b.input, op),
    "reduce_scatter": lambda c, b, op: partial(c.reduce_scatter, b.output, b.input, op),
    "all_gather": lambda c, b, op: partial(c.all_gather, b.output, b.input),
    "broadcast": lambda c, b, op: partial(c.broadcast, b.input),
    "reduce": lambda c, b, op: partial(c.reduce, b.input, 0, op),
    "gather": lambda c, b, op: partial(c.gather, b.output, b.input),
    "scatter": lambda c, b, op: partial(c.scatter, b.output, b.input),
    "all_to_all": lambda c, b, op: partial(c.all_to_all, b.output, b.input),
}


class Ours:
    def __init__(self, transport: str) -> None:
        self.version = f"ringdp {metadata.version('ringdp')}, {transport}"
        self._device = "cpu"
        if transport == "nccl":
            self._device = self._take_gpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        self._comm = ringdp.init(transport=cast(TransportName, transport))
        self.rank, self.ranks = self._comm.rank, self._comm.size

    def _take_gpu(self, rank: int, ranks: int) -> str:
        gpus = torch.cuda.device_count()
        if gpus < ranks:
            os.environ |= SOCKETS | {"NCCL_HOSTID": f"ringdp-{rank}"}
            self.version += f", {gpus} GPUs: through sockets"
        torch.cuda.set_device(rank % gpus)
        return f"cuda:{rank % gpus}"

    def buffers(self, task: Task, case: Case) -> Buffers:
        plain = plain_buffers(task, case, self.ranks, self._device)
        if not task.registered:
            return plain
        taken = self._comm.empty(plain.input.numel(), dtype=torch_dtype(task.dtype))
        return Buffers(taken, taken if case.gives is None else plain.output)

    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        call = CALLS[task.collective](self._comm, buffers, cast(ReduceOp, task.op))
        if task.algorithm != "auto":
            call = partial(call, algorithm=task.algorithm)
        return call if self._device == "cpu" else partial(self._ended, call)

    def barrier(self) -> None:
        self._ended(self._comm.barrier)

    def _ended(self, call: Callable[[], object]) -> None:
        """Made, and what it started on a GPU is over."""
        call()
        if self._device != "cpu":
            torch.cuda.synchronize()

    def close(self) -> None:
        self._comm.close()


connect = Ours
