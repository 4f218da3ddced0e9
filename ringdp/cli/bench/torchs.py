"""The contender torch.distributed: over gloo, with one thread per rank as torchrun has, or NCCL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.cli import gpus
from ringdp.cli.bench.cases import Task
from ringdp.cli.bench.contender import Buffers, Contender

OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
CALLS: dict[str, Callable[[Buffers, str], Callable[[], object]]] = {
    "all_reduce": lambda b, op: partial(dist.all_reduce, b.input, OPS[op]),
    "reduce_scatter": lambda b, op: partial(dist.reduce_scatter_tensor, b.output, b.input, OPS[op]),
    "all_gather": lambda b, op: partial(dist.all_gather_into_tensor, b.output, b.input),
    "broadcast": lambda b, op: partial(dist.broadcast, b.input, 0),
    "reduce": lambda b, op: partial(dist.reduce, b.input, 0, OPS[op]),
    "gather": lambda b, op: partial(dist.gather, b.input, _at_root(b.output)),
    "scatter": lambda b, op: partial(dist.scatter, b.output, _at_root(b.input)),
    "all_to_all": lambda b, op: partial(dist.all_to_all_single, b.output, b.input),
}


def _at_root(whole: Tensor) -> list[Tensor] | None:
    return None if dist.get_rank() else list(whole.chunk(dist.get_world_size()))


class Torchs(Contender):
    def __init__(self, name: str) -> None:
        if name == gpus.TORCHS:
            self.device, among = gpus.take(name)
            dist.init_process_group("nccl", device_id=torch.device(self.device))
            version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            self.version = f"NCCL {version} of torch {torch.__version__}{among}"
        else:
            dist.init_process_group("gloo")
            self.version = f"gloo of torch {torch.__version__}"
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        return CALLS[task.collective](buffers, task.op)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()
