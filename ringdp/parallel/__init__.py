"""When collectives happen in training: DDP and ZeRO-1, 2, 3 from one engine."""

from ringdp.parallel.ddp import DistributedDataParallel
from ringdp.parallel.engine import Engine, shard

__all__ = ["DistributedDataParallel", "Engine", "shard"]
