"""The contender ringdp, over one of its transports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import cast

from torch import Tensor

import ringdp
from ringdp.cli import gpus
from ringdp.cli.bench.cases import Task, torch_dtype
from ringdp.cli.bench.contender import Buffers, Contender
from ringdp.comm import Communicator
from ringdp.comm.rendezvous import TransportName
from ringdp.transport.base import ReduceOp

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


class Ours(Contender):
    def __init__(self, transport: str) -> None:
        self.version = f"ringdp {metadata.version('ringdp')}, {transport}"
        if transport in gpus.OURS:
            self.device, among = gpus.take(transport)
            self.version += among
        self._comm = ringdp.init(transport=cast(TransportName, transport))
        self.rank, self.ranks = self._comm.rank, self._comm.size

    def input(self, task: Task, count: int) -> Tensor:
        if not task.registered:
            return super().input(task, count)
        return self._comm.empty(count, dtype=torch_dtype(task.dtype))

    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        call = CALLS[task.collective](self._comm, buffers, cast(ReduceOp, task.op))
        if task.algorithm != "auto":
            call = partial(call, algorithm=task.algorithm)
        return call

    def barrier(self) -> None:
        self._comm.barrier()

    def close(self) -> None:
        self._comm.close()
