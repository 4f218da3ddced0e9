"""NCCL's own collectives, as the algorithm "nccl": a baseline for ours, with NCCL's rounding.

all_reduce      ncclAllReduce
reduce_scatter  ncclReduceScatter; if shards differ in length, an ncclReduce per shard
all_gather      ncclAllGather; if shards differ in length, an ncclBroadcast per shard
all_to_all      a group of ncclSend and ncclRecv
"""

from __future__ import annotations

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


def check(what: Exchange) -> None:
    """Raises UsageError if NCCL does not support the op on this dtype."""
    adds = what.collective in ("all_reduce", "reduce_scatter")
    if adds and (what.dtype not in TYPES or what.op not in OPS):
        names = ", ".join(str(d).removeprefix("torch.") for d in TYPES)
        raise UsageError(
            f"algorithm 'nccl' does not {what.op} {what.dtype}; allowed: "
            f"{', '.join(OPS)} of {names}, or another algorithm"
        )


def run(what: Exchange, nccl: Nccl, whole: int, part: int, rank: int, ranks: int) -> int:
    """Run it on the buffers at addresses `whole` and `part`.

    Returns the payload bytes that this rank sends.
    """
    comm, stream, size = nccl.comm, nccl.streams.handle, what.dtype.itemsize
    shards = [(whole + begin * size, end - begin) for begin, end in pairwise(what.shards)]
    total, own = what.elements, shards[rank][1]
    even = len({count for _, count in shards}) == 1
    match what.collective:
        case "all_reduce":
            if total:
                type_, op = TYPES[what.dtype], OPS[what.op]
                comm.allReduce(whole, whole, total, type_, op, stream)
            return 2 * (ranks - 1) * total * size // ranks
        case "reduce_scatter":
            type_, op = TYPES[what.dtype], OPS[what.op]
            if not even:
                with grouped(nccl.binding):
                    for r, (at, count) in enumerate(shards):
                        if count:
                            out = part if r == rank else 0
                            comm.reduce(at, out, count, type_, op, r, stream)
            elif own:
                comm.reduceScatter(whole, part, own, type_, op, stream)
            return (total - own) * size
        case "all_gather" if what.root is None:
            if not even:
                with grouped(nccl.binding):
                    for r, (at, count) in enumerate(shards):
                        if count:
                            source = part if r == rank else at
                            comm.broadcast(source, at, count * size, BYTES, r, stream)
            elif own:
                comm.allGather(part, whole, own * size, BYTES, stream)
            return (ranks - 1) * own * size
        case _:
            return _exchange(what, nccl, [(at, count * size) for at, count in shards], part, rank)


def _exchange(
    what: Exchange, nccl: Nccl, shards: list[tuple[int, int]], part: int, rank: int
) -> int:
    """Run it as one group of sends and receives. Returns the bytes sent to other ranks.

    `shards` are the addresses and bytes of the parts of `whole`. In an all_gather the root's whole
    collects all of them. In an all_to_all shard r of a sender's whole goes to rank r, whose part
    holds a piece from each sender: every rank, or only the root.
    """
    root, own, sent = what.root, shards[rank][1], 0
    comm, stream = nccl.comm, nccl.streams.handle
    with grouped(nccl.binding):
        for r, shard in enumerate(shards):
            if what.collective == "all_gather":
                sends, out = r == root, (part, own)
                receives, into = rank == root, shard
            else:
                sends, out = root in (None, rank), shard
                receives, into = root in (None, r), (part + (r * own if root is None else 0), own)
            if sends and out[1]:
                comm.send(*out, BYTES, r, stream)
                sent += out[1] * (r != rank)
            if receives and into[1]:
                comm.recv(*into, BYTES, r, stream)
    return sent
