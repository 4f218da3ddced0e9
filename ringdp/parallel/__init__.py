"""When collectives happen in training: DDP and ZeRO-1, 2, 3 from one engine."""

from ringdp.parallel.ddp import DistributedDataParallel
from ringdp.parallel.engine import Engine, shard
from ringdp.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["DistributedDataParallel", "Engine", "SyncBatchNorm", "shard"]
