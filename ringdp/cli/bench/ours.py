"""ringdp's communicator as a contender, over one of its transports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import cast

import ringdp
from ringdp.cli.bench import gpus
from ringdp.cli.bench.cases import Case, Task, torch_dtype
from ringdp.cli.bench.contender import Buffers, plain_buffers
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


class Ours:
    def __init__(self, transport: str) -> None:
        self.version = f"ringdp {metadata.version('ringdp')}, {transport}"
        self._device = "cpu"
        if transport in gpus.OURS:
            self._device, among = gpus.take(transport)
            self.version += among
        self._comm = ringdp.init(transport=cast(TransportName, transport))
        self.rank, self.ranks = self._comm.rank, self._comm.size

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
        return call if self._device == "cpu" else partial(gpus.ended, call)

    def barrier(self) -> None:
        if self._device == "cpu":
            self._comm.barrier()
        else:
            gpus.ended(self._comm.barrier)

    def close(self) -> None:
        self._comm.close()


connect = Ours
