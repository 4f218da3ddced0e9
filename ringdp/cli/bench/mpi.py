"""The contenders MPICH and OpenMPI, called through mpi4py with numpy buffers.

Importing this module starts MPI. The environment (see `peers`) decides which library is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from ringdp.cli.bench.cases import Task, exchanged, part_sizes, uneven
from ringdp.cli.bench.contenders import Buffers, Contender, lap

OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
Array = Any  # numpy's, of any dtype
CALLS: dict[str, Callable[[MPI.Comm, Array, Array, MPI.Op], Callable[[], object]]] = {
    "all_reduce": lambda c, i, o, op: partial(c.Allreduce, MPI.IN_PLACE, i, op),
    "reduce_scatter": lambda c, i, o, op: partial(c.Reduce_scatter_block, i, o, op),
    "all_gather": lambda c, i, o, op: partial(c.Allgather, i, o),
    "broadcast": lambda c, i, o, op: partial(c.Bcast, i),
    "reduce": lambda c, i, o, op: (
        partial(c.Reduce, i, None, op) if c.rank else partial(c.Reduce, MPI.IN_PLACE, i, op)
    ),
    "gather": lambda c, i, o, op: partial(c.Gather, i, None if c.rank else o),
    "scatter": lambda c, i, o, op: partial(c.Scatter, None if c.rank else i, o),
    "all_to_all": lambda c, i, o, op: partial(c.Alltoall, i, o),
    "reduce_scatter_v": lambda c, i, o, op: partial(c.Reduce_scatter, i, o, _uneven(c, i)[1], op),
    "all_gather_v": lambda c, i, o, op: partial(c.Allgatherv, i, _uneven(c, o)),
    "gather_v": lambda c, i, o, op: partial(c.Gatherv, i, None if c.rank else _uneven(c, o)),
    "scatter_v": lambda c, i, o, op: partial(c.Scatterv, None if c.rank else _uneven(c, i), o),
    "all_to_all_v": lambda c, i, o, op: partial(
        c.Alltoallv,
        *reversed([*zip((o, i), exchanged(len(i), c.size, c.rank), strict=True)]),
    ),
    "send": lambda c, i, o, op: lap(c.rank, c.size, partial(c.Send, i), partial(c.Recv, o)),
}


def _uneven(c: MPI.Comm, whole: Array) -> tuple[Array, list[int]]:
    return whole, part_sizes(len(whole), uneven(c.size))


class Mpi(Contender):
    version = MPI.Get_library_version().partition("\n")[0].partition(",")[0]

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank, self.ranks = self._comm.rank, self._comm.size
        self.barrier, self.close = self._comm.Barrier, MPI.Finalize

    def call(self, task: Task, buffers: Buffers) -> Callable[[], object]:
        arrays = buffers.input.numpy(), buffers.output.numpy()
        return CALLS[task.collective](self._comm, *arrays, OPS[task.op])
