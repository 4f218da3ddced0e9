"""The contenders: one rank of each library, and the messages between controller and worker.

The MPI libraries are in `mpi`, because importing that starts MPI.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import ClassVar, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ringdp
from ringdp.cli import gpus
from ringdp.cli.bench.cases import Task, exchanged, part_sizes, torch_dtype, uneven
from ringdp.comm import Communicator
from ringdp.comm.rendezvous import TransportName
from ringdp.transport.base import ReduceOp

FOLDER = "ringdp-"  # begins the name of the controller's temporary folder, with the sockets


class Buffers(NamedTuple):
    input: Tensor
    output: Tensor  # the input itself if the collective works in place


class Contender(ABC):
    """One library, as seen by one of its ranks."""

    rank: int
    ranks: int
    version: str
    barrier: Callable[[], object]
    close: Callable[[], object]
    device = "cpu"

    def input(self, task: Task, count: int) -> Tensor:
        """Allocate an input of `count` elements."""
        return torch.empty(count, dtype=torch_dtype(task.dtype), device=self.device)

    @abstractmethod
    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        """The call to time, as users write it. On a GPU it may return before it has finished."""


class Hello(NamedTuple):
    rank: int
    pid: int
    version: str


class Round(NamedTuple):
    """`number` counts the rounds of a task; `calls` is how many calls are timed."""

    task: Task
    number: int
    calls: int


class Times(NamedTuple):
    nanoseconds: list[int]  # of each timed call on this rank
    wrong: int  # elements


class Failure(NamedTuple):
    traceback: str


def lap(
    rank: int, n: int, send: Callable[[int], object], recv: Callable[[int], object]
) -> Callable[[], object]:
    """One rank's part in a lap of `send`: see `cases`."""
    calls = partial(send, (rank + 1) % n), partial(recv, (rank - 1) % n)
    first, second = calls if rank == 0 else calls[::-1]
    return lambda: (first(), second())


OUR_CALLS: dict[str, Callable[[Communicator, Buffers, ReduceOp], Callable[..., object]]] = {
    "all_reduce": lambda c, b, op: partial(c.all_reduce, b.input, op),
    "reduce_scatter": lambda c, b, op: partial(c.reduce_scatter, b.output, b.input, op),
    "all_gather": lambda c, b, op: partial(c.all_gather, b.output, b.input),
    "broadcast": lambda c, b, op: partial(c.broadcast, b.input),
    "reduce": lambda c, b, op: partial(c.reduce, b.input, 0, op),
    "gather": lambda c, b, op: partial(c.gather, b.output, b.input),
    "scatter": lambda c, b, op: partial(c.scatter, b.output, b.input),
    "all_to_all": lambda c, b, op: partial(c.all_to_all, b.output, b.input),
    "reduce_scatter_v": lambda c, b, op: partial(
        c.reduce_scatter_v, b.output, b.input, part_sizes(len(b.input), uneven(c.size)), op
    ),
    "all_gather_v": lambda c, b, op: partial(
        c.all_gather_v, b.output, b.input, part_sizes(len(b.output), uneven(c.size))
    ),
    "gather_v": lambda c, b, op: partial(
        c.gather_v, b.output, b.input, part_sizes(len(b.output), uneven(c.size))
    ),
    "scatter_v": lambda c, b, op: partial(
        c.scatter_v, b.output, b.input, part_sizes(len(b.input), uneven(c.size))
    ),
    "all_to_all_v": lambda c, b, op: partial(
        c.all_to_all_v, b.output, b.input, *exchanged(len(b.input), c.size, c.rank)
    ),
    "send": lambda c, b, op: lap(
        c.rank, c.size, partial(c.send, b.input), partial(c.recv, b.output)
    ),
}


class Ours(Contender):
    """ringdp, over one of its transports."""

    def __init__(self, transport: str) -> None:
        self.version = f"ringdp {metadata.version('ringdp')}, {transport}"
        if transport in gpus.ON_GPU:
            self.device, among = gpus.take(transport)
            self.version += among
        self._comm = ringdp.init(transport=cast(TransportName, transport))
        self.rank, self.ranks = self._comm.rank, self._comm.size
        self.barrier, self.close = self._comm.barrier, self._comm.close

    def input(self, task: Task, count: int) -> Tensor:
        if not task.registered:
            return super().input(task, count)
        return self._comm.empty(count, dtype=torch_dtype(task.dtype))

    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        call = OUR_CALLS[task.collective](self._comm, buffers, cast(ReduceOp, task.op))
        if task.algorithm != "auto":
            call = partial(call, algorithm=task.algorithm)
        return call


OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
TORCH_CALLS: dict[str, Callable[[Buffers, str], Callable[[], object]]] = {
    "all_reduce": lambda b, op: partial(dist.all_reduce, b.input, OPS[op]),
    "reduce_scatter": lambda b, op: partial(dist.reduce_scatter_tensor, b.output, b.input, OPS[op]),
    "all_gather": lambda b, op: partial(dist.all_gather_into_tensor, b.output, b.input),
    "broadcast": lambda b, op: partial(dist.broadcast, b.input, 0),
    "reduce": lambda b, op: partial(dist.reduce, b.input, 0, OPS[op]),
    "gather": lambda b, op: partial(dist.gather, b.input, _at_root(b.output)),
    "scatter": lambda b, op: partial(dist.scatter, b.output, _at_root(b.input)),
    "all_to_all": lambda b, op: partial(dist.all_to_all_single, b.output, b.input),
    "reduce_scatter_v": lambda b, op: partial(
        dist.reduce_scatter, b.output, _uneven(b.input), OPS[op]
    ),
    "all_gather_v": lambda b, op: partial(dist.all_gather, _uneven(b.output), b.input),
    "all_to_all_v": lambda b, op: partial(
        dist.all_to_all_single,
        b.output,
        b.input,
        *exchanged(len(b.input), dist.get_world_size(), dist.get_rank()),
    ),
    "send": lambda b, op: lap(
        dist.get_rank(),
        dist.get_world_size(),
        partial(dist.send, b.input),
        partial(dist.recv, b.output),
    ),
}


def _uneven(whole: Tensor) -> list[Tensor]:
    return list(torch.split(whole, part_sizes(len(whole), uneven(dist.get_world_size()))))


def _at_root(whole: Tensor) -> list[Tensor] | None:
    return None if dist.get_rank() else list(whole.chunk(dist.get_world_size()))


class Torchs(Contender):
    """torch.distributed: over gloo, with one thread per rank as torchrun has, or NCCL."""

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
        self.barrier, self.close = dist.barrier, dist.destroy_process_group

    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        return TORCH_CALLS[task.collective](buffers, task.op)


LINE = 8  # int64s between the flags of two ranks


class Probe(Contender):
    """Measures how fast the machine's cores copy and read, for `bound`.

    Its ranks share memory: a page of flags for the barrier, then a buffer per rank.
    """

    version = "copies and reads of this machine"
    shared: ClassVar[mmap.mmap]

    @classmethod
    def share(cls, ranks: int, size: int) -> None:
        """Map the memory, with `size` bytes per rank, in the process that forks the ranks."""
        cls.shared = mmap.mmap(-1, mmap.PAGESIZE + ranks * size)

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._flags = np.frombuffer(self.shared, np.int64, self.ranks * LINE)[::LINE]
        self._passed = 0

    def input(self, task: Task, count: int) -> Tensor:
        return self._part(task, self.rank)

    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        peer = self._part(task, (self.rank + 1) % self.ranks)
        match task.collective:
            case "fold":
                mine, theirs = (
                    t.tensor_split(self.ranks)[self.rank].numpy() for t in (buffers.input, peer)
                )
                return partial(np.add, mine, theirs, out=mine)
            case "read":
                return partial(torch.sum, peer)
            case "pull":
                return partial(np.copyto, buffers.output.numpy(), peer.numpy())
        return partial(np.copyto, buffers.output.numpy(), buffers.input.numpy())

    def barrier(self) -> None:
        """Spin: this contender never has more ranks than cores."""
        self._passed += 1
        self._flags[self.rank] = self._passed
        while (self._flags < self._passed).any():
            pass

    def close(self) -> None:
        """Leave the mapping, into which tensors still point, to the end of the process."""

    def _part(self, task: Task, rank: int) -> Tensor:
        room = (len(self.shared) - mmap.PAGESIZE) // self.ranks
        offset = mmap.PAGESIZE + rank * room
        return torch.frombuffer(
            self.shared, dtype=torch_dtype(task.dtype), count=task.count, offset=offset
        )
