"""Executes plans on NCCL: one group per round and tile, with folds overlapping it.

Usually a process runs one rank's plan. It may run those of several ranks that share a one-rank
communicator, which sends to itself: the i-th send of a group matches the i-th receive. So a whole
collective runs on one GPU with real transfers and real folds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch

from ringdp.errors import CommunicationError
from ringdp.kernels import fold as fold_rows
from ringdp.transport.base import ReduceOp
from ringdp.transport.device.streams import PARITIES, Streams
from ringdp.transport.nccl.library import Binding, Comm, grouped
from ringdp.transport.nccl.plan import Fold, Round
from ringdp.transport.nccl.tiles import Tiles
from ringdp.transport.rows import COMBINE, divided, widened

BYTES = 1  # ncclUint8: data that is only moved needs no other type


class Nccl(NamedTuple):
    """The binding, communicator and streams that NCCL calls use."""

    binding: Binding
    comm: Comm
    streams: Streams


def warm_up(nccl: Nccl, rank: int, ranks: int) -> None:
    """Exchange a byte between every pair: NCCL connects a pair at its first message, which must not
    happen during graph capture.

    Raises CommunicationError if a rank cannot reach another.
    """
    data = nccl.streams.empty(2)
    comm, stream = nccl.comm, nccl.streams.handle
    try:
        for shift in range(1, ranks):
            with grouped(nccl.binding):
                comm.send(data.data_ptr(), 1, BYTES, (rank + shift) % ranks, stream)
                comm.recv(data.data_ptr() + 1, 1, BYTES, (rank - shift) % ranks, stream)
        nccl.streams.drain()
    except nccl.binding.NcclError as e:
        why = f"rank {rank} cannot reach all others by NCCL: {e}"
        raise CommunicationError(why) from e


def execute(
    nccl: Nccl,
    ranks: Mapping[int, Tiles],
    op: ReduceOp,
    peer: Callable[[int], int] = lambda rank: rank,
) -> int:
    """Run the plans of `ranks`. Returns the bytes that they send.

    `peer` maps a rank of the plan to a rank of the communicator. Raises what NCCL raises.
    """
    sent = 0
    by_round: dict[int, dict[int, Round]] = {}
    for rank, tiles in ranks.items():
        for one in tiles.plan.rounds:
            by_round.setdefault(one.number, {})[rank] = one
    tiles_of_all = max((tiles.count for tiles in ranks.values()), default=0)
    with nccl.streams.beside() if tiles_of_all > 1 else nullcontext():
        for first in range(0, tiles_of_all, PARITIES):
            for _, rounds in sorted(by_round.items()):
                for tile in range(first, min(first + PARITIES, tiles_of_all)):
                    _compute(nccl.streams, ranks, rounds, tile, op)
                    sent += _move(nccl, ranks, rounds, tile, peer)
    return sent


def _compute(
    streams: Streams,
    ranks: Mapping[int, Tiles],
    rounds: Mapping[int, Round],
    tile: int,
    op: ReduceOp,
) -> None:
    if not any(one.folds for one in rounds.values()):
        return
    with streams.in_chain(tile % PARITIES, folds=True):
        for rank, one in rounds.items():
            for fold in one.folds:
                fold_tile(ranks[rank], fold, tile, op)


def _move(
    nccl: Nccl,
    ranks: Mapping[int, Tiles],
    rounds: Mapping[int, Round],
    tile: int,
    peer: Callable[[int], int],
) -> int:
    sends: list[tuple[int, int, tuple[int, int]]] = []  # from, to, (address, bytes)
    receives: list[tuple[int, int, tuple[int, int]]] = []
    for rank, one in rounds.items():
        at = ranks[rank].bytes_of
        sends += [(rank, c.peer, at(c.place, c.like, tile)) for c in one.sends]
        receives += [(c.peer, rank, at(c.place, c.like, tile)) for c in one.receives]
    sends = sorted((s for s in sends if s[2][1]), key=lambda s: s[:2])
    receives = sorted((r for r in receives if r[2][1]), key=lambda r: r[:2])
    if not sends and not receives:
        return 0
    comm, stream = nccl.comm, nccl.streams.handle
    with nccl.streams.in_chain(tile % PARITIES, folds=False), grouped(nccl.binding):
        for _, to, (address, size) in sends:
            comm.send(address, size, BYTES, peer(to), stream)
        for sender, _, (address, size) in receives:
            comm.recv(address, size, BYTES, peer(sender), stream)
    return sum(size for _, _, (_, size) in sends)


def fold_tile(tiles: Tiles, fold: Fold, tile: int, op: ReduceOp) -> None:
    """Run one fold on one tile. The result equals that of `rows.Rows` bit for bit."""
    out = tiles.place(fold.out, fold.like, tile)
    if not out.numel():
        return
    if len(fold.parts) == 1:
        out.copy_(tiles.place(fold.parts[0], fold.like, tile))
        return
    first, *rest = parts = [tiles.place(part, fold.like, tile) for part in fold.parts]
    own = [i for i, part in enumerate(fold.parts) if part < tiles.plan.chunks]
    block = tiles.block([part for part in fold.parts if part >= tiles.plan.chunks], fold.like, tile)
    sums = op in ("sum", "avg") and out.dtype != torch.bool
    if sums and block is not None and len(own) < 2:
        value = out if op == "sum" else torch.empty_like(out, dtype=torch.float32)
        if own:
            fold_rows(block, value, parts[own[0]], own[0])
        else:
            fold_rows(block, value)
    else:
        value = widened(first)
        for part in rest:
            value = COMBINE[op](value, widened(part))
    if value is not out:
        out.copy_(divided(value, len(parts)) if op == "avg" else value)
