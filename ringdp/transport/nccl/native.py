"""NCCL's own collectives, as the algorithm "nccl": a baseline for ours, with NCCL's rounding.

all_reduce      ncclAllReduce
reduce_scatter  ncclReduceScatter; if shards differ in length, an ncclReduce per shard
all_gather      ncclAllGather; if shards differ in length, an ncclBroadcast per shard
all_to_all      a group of ncclSend and ncclRecv
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from ringdp.errors import UsageError
from ringdp.transport.base import Exchange, ReduceOp
from ringdp.transport.nccl.execute import BYTES, Nccl
from ringdp.transport.nccl.library import grouped

TYPES = {  # ncclDataType_t
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
OPS: dict[ReduceOp, int] = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}  # ncclRedOp_t


class Native(Exchange):
    """An exchange run by one of NCCL's collectives."""

    def check(self) -> None:
        """Raises UsageError if NCCL does not support the op on this dtype."""
        adds = self.collective in ("all_reduce", "reduce_scatter")
        if adds and (self.dtype not in TYPES or self.op not in OPS):
            names = ", ".join(str(d).removeprefix("torch.") for d in TYPES)
            raise UsageError(
                f"algorithm 'nccl' does not {self.op} {self.dtype}; allowed: "
                f"{', '.join(OPS)} of {names}, or another algorithm"
            )

    def run(self, nccl: Nccl, whole: int, part: int, rank: int, ranks: int) -> int:
        """Run it on the buffers at addresses `whole` and `part`.

        Returns the payload bytes that this rank sends.
        """
        act: Callable[[Nccl, int, int, int, int], int] = getattr(self, f"_{self.collective}")
        return act(nccl, whole, part, rank, ranks)

    @property
    def _even(self) -> bool:
        return len({end - begin for begin, end in pairwise(self.shards)}) == 1 and self.root is None

    def _all_reduce(self, nccl: Nccl, whole: int, _: int, __: int, ranks: int) -> int:
        count, type_, op = self.shards[-1], TYPES[self.dtype], OPS[self.op]
        if count:
            nccl.comm.allReduce(whole, whole, count, type_, op, nccl.streams.handle)
        return 2 * (ranks - 1) * count * self.dtype.itemsize // ranks

    def _reduce_scatter(self, nccl: Nccl, whole: int, part: int, rank: int, _: int) -> int:
        type_, op, stream = TYPES[self.dtype], OPS[self.op], nccl.streams.handle
        size, cuts = self.dtype.itemsize, list(pairwise(self.shards))
        if self._even:
            if count := self.shards[1]:
                nccl.comm.reduceScatter(whole, part, count, type_, op, stream)
        else:
            with grouped(nccl.binding):
                for r, (begin, end) in enumerate(cuts):
                    out = part if r == rank else 0
                    if end > begin:
                        at = whole + begin * size
                        nccl.comm.reduce(at, out, end - begin, type_, op, r, stream)
        return (self.shards[-1] - (cuts[rank][1] - cuts[rank][0])) * size

    def _all_gather(self, nccl: Nccl, whole: int, part: int, rank: int, ranks: int) -> int:
        size, cuts, stream = self.dtype.itemsize, list(pairwise(self.shards)), nccl.streams.handle
        owned = (cuts[rank][1] - cuts[rank][0]) * size
        if self.root is not None:
            return self._exchanged(nccl, whole, part, rank, gathers=True)
        if self._even:
            if owned:
                nccl.comm.allGather(part, whole, owned, BYTES, stream)
        else:
            with grouped(nccl.binding):
                for r, (begin, end) in enumerate(cuts):
                    if end > begin:
                        at = whole + begin * size
                        source = part if r == rank else at
                        nccl.comm.broadcast(source, at, (end - begin) * size, BYTES, r, stream)
        return (ranks - 1) * owned

    def _all_to_all(self, nccl: Nccl, whole: int, part: int, rank: int, _: int) -> int:
        return self._exchanged(nccl, whole, part, rank, gathers=False)

    def _exchanged(self, nccl: Nccl, whole: int, part: int, rank: int, *, gathers: bool) -> int:
        """Run it as one group of sends and receives. Returns the bytes sent to other ranks.

        If `gathers`, the root's whole collects all shards. Otherwise shard r of a sender's whole
        goes to rank r, whose part holds a piece from each sender: every rank, or only the root.
        """
        size, cuts, root = self.dtype.itemsize, list(pairwise(self.shards)), self.root
        spans = [(begin * size, (end - begin) * size) for begin, end in cuts]
        owned, sent = spans[rank][1], 0
        comm, stream = nccl.comm, nccl.streams.handle
        with grouped(nccl.binding):
            for r, (at, length) in enumerate(spans):
                if gathers:
                    out = (part, owned) if r == root else None
                    into = (whole + at, length) if rank == root else None
                else:
                    out = (whole + at, length) if root in (None, rank) else None
                    into = (part + (r * owned if root is None else 0), owned)
                    into = into if root in (None, r) else None
                if out is not None and out[1]:
                    comm.send(*out, BYTES, r, stream)
                    sent += out[1] * (r != rank)
                if into is not None and into[1]:
                    comm.recv(*into, BYTES, r, stream)
        return sent
