"""Which ranks hold a model together, and which hold the same shard of its replicas.

All ranks hold one model, unless `shard_size` is smaller: then each `shard_size` consecutive ranks
hold a replica of it. If these are the GPUs of a host, weights never cross the network, and of
gradients only sums over a host's ranks do:

    rank     0  1  2  3     with shard_size=2
    replica  0  0  1  1     all_gathers and reduce_scatters among 0, 1 and among 2, 3
    shard    0  1  0  1     then all_reduces of the shards' gradients among 0, 2 and among 1, 3

So gradients are summed in another order than without replicas, and round differently. Zhang et al.
2022 (MiCS); torch's HYBRID_SHARD.

With a `reshard_size`, each so many of the ranks that hold a model keep a piece each of every unit
between its forward and its backward, which then gathers it among them: with the GPUs of a host,
only the forward's all_gather and the reduce_scatter cross the network. Wang et al. 2023 (ZeRO++,
hpZ); torch's reshard_after_forward=int.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from ringdp.comm import Communicator


class Ranks(NamedTuple):
    """every: all that train. shards: those that this rank holds a model with. replicas: those that
    have the same shard as this one; None if there is one replica. near: those of `shards` that keep
    all of a unit between its forward and backward; None if units are gathered from all again."""

    every: Communicator
    shards: Communicator
    replicas: Communicator | None = None
    near: Communicator | None = None

    @property
    def replica_count(self) -> int:
        return self.every.size // self.shards.size

    @property
    def replica(self) -> int:
        """Which of them this rank holds a shard of."""
        return self.every.rank // self.shards.size

    @property
    def made(self) -> list[Communicator]:
        """Those that `ranks_of` has made."""
        return [each for each in self[1:] if each and each is not self.every]

    def close(self) -> None:
        """Close what `ranks_of` has made."""
        with ExitStack() as closed:
            for each in self.made:
                closed.callback(each.close)


def ranks_of(every: Communicator, shard_size: int, reshard_size: int) -> Ranks:
    """Collective: it makes the communicators that are of fewer ranks."""
    shards, replicas, near = every, None, None
    if shard_size < every.size:
        shards, replicas = (_split(every, color) for color in divmod(every.rank, shard_size))
    if 1 < reshard_size < shard_size:
        near = _split(shards, shards.rank // reshard_size)
    return Ranks(every, shards, replicas, near)


def _split(ranks: Communicator, color: int) -> Communicator:
    made = ranks.split(color)
    assert made is not None
    return made
