"""Naive data parallelism, as torch.nn.DataParallel: one process, which copies its model each time.

    forward     parameters go to every replica, and to each its share of the rows; outputs come back
    backward    outputs' gradients go to the replicas, parameters' gradients come back and add up

Bytes copied in a step, with P of parameters, X of inputs and Y of outputs, of which the first
replica keeps its own:

    2·(n − 1)·P + (n − 1)/n·(X + 2·Y)

All of it goes through one place, and nothing overlaps with computing.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor, nn


class DataParallel(nn.Module):
    """`module` on `replicas` parts of the rows at once, each in a thread. `copied`: bytes so far.

    `module` takes one tensor of [rows, ...] and returns one of [rows, ...].
    """

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module, self.replicas, self.copied = module, replicas, 0

    def forward(self, rows: Tensor) -> Tensor:
        first, *others = rows.chunk(self.replicas)
        jobs = [(self.module, first)] + [(self._replica(), self._move(part)) for part in others]
        grad, start = torch.is_grad_enabled(), Barrier(len(jobs))
        kind = rows.device.type
        casts, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def run(job: tuple[nn.Module, Tensor]) -> Tensor:
            # One job per thread: backward adds gradients in an order that depends on the threads.
            start.wait()
            # Every thread has these for itself.
            with torch.set_grad_enabled(grad), torch.autocast(kind, dtype, enabled=casts):
                output: Tensor = job[0](job[1])
            return output

        with ThreadPoolExecutor(len(jobs)) as threads:
            outputs = list(threads.map(run, jobs))
        return torch.cat([outputs[0], *(self._move(output) for output in outputs[1:])])

    def _replica(self) -> nn.Module:
        """The module with its parameters moved, and a copy of its buffers.

        A module of its own: a thread that swaps the parameters of one swaps them for all threads.
        """
        parameters = {id(p): self._move(p) for p in self.module.parameters()}
        return copy.deepcopy(self.module, dict[int, Any](parameters))

    def _move(self, tensor: Tensor) -> Tensor:
        moved: Tensor = _Move.apply(tensor, self)  # type: ignore[no-untyped-call]
        return moved


class _Move(torch.autograd.Function):
    """From one replica's memory to another's; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, owner: DataParallel) -> Tensor:
        ctx.owner = owner
        owner.copied += tensor.nbytes
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.owner.copied += gradient.nbytes
        return gradient.clone(), None
