"""Which ranks hold a model together, and which hold the same shard of its replicas.

All ranks hold one model, unless `shard_size` is smaller: then each `shard_size` consecutive ranks
hold a replica of it. If these are the GPUs of a host, weights never cross the network, and of
gradients only sums over a host's ranks do:

    rank     0  1  2  3     with shard_size=2
    replica  0  0  1  1     all_gathers and reduce_scatters among 0, 1 and among 2, 3
    shard    0  1  0  1     then all_reduces of the shards' gradients among 0, 2 and among 1, 3

So gradients are summed in another order than without replicas, and round differently. Zhang et al.
2022 (MiCS); torch's HYBRID_SHARD.
"""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from ringdp.comm import Communicator


class Ranks(NamedTuple):
    """every: all that train. shards: those that this rank holds a model with. replicas: those that
    have the same shard as this one; None if there is one replica."""

    every: Communicator
    shards: Communicator
    replicas: Communicator | None = None

    @property
    def replica_count(self) -> int:
        return self.every.size // self.shards.size

    @property
    def replica(self) -> int:
        """Which of them this rank holds a shard of."""
        return self.every.rank // self.shards.size

    def close(self) -> None:
        """Close what `ranks_of` has made."""
        if self.replicas:
            with closing(self.shards):
                self.replicas.close()


def ranks_of(every: Communicator, shard_size: int) -> Ranks:
    """Collective if there are several replicas: it makes communicators."""
    if shard_size == every.size:
        return Ranks(every, every)
    replica, shard = divmod(every.rank, shard_size)
    shards, replicas = every.split(replica), every.split(shard)
    assert shards is not None
    assert replicas is not None
    return Ranks(every, shards, replicas)
