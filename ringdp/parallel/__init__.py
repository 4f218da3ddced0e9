"""When collectives happen in training: DDP and ZeRO-1, 2, 3 from one engine."""

from ringdp.parallel.checkpoint.export import export
from ringdp.parallel.checkpoint.load import load
from ringdp.parallel.checkpoint.save import save
from ringdp.parallel.ddp.sync_batchnorm import SyncBatchNorm
from ringdp.parallel.ddp.torch_api import DistributedDataParallel
from ringdp.parallel.engine import Engine
from ringdp.parallel.entry import shard
from ringdp.parallel.fronts import (
    FullyShardedDataParallel,
    ZeroRedundancyOptimizer,
    fully_shard,
    initialize,
)
from ringdp.parallel.offload import Offload
from ringdp.parallel.optimizer.adamw import AdamW
from ringdp.parallel.optimizer.clip import clip_grad_norm_
from ringdp.parallel.optimizer.scaler import LossScaler
from ringdp.parallel.precision import Precision

__all__ = [
    "AdamW",
    "DistributedDataParallel",
    "Engine",
    "FullyShardedDataParallel",
    "LossScaler",
    "Offload",
    "Precision",
    "SyncBatchNorm",
    "ZeroRedundancyOptimizer",
    "clip_grad_norm_",
    "export",
    "fully_shard",
    "initialize",
    "load",
    "save",
    "shard",
]
