"""ringdp: collectives and data-parallel training (DDP, ZeRO-1, 2, 3) from scratch."""

from ringdp.comm import Communicator, Link, Work, init, trace
from ringdp.comm.backend import register
from ringdp.errors import (
    CheckpointError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    ModelError,
    PeerLost,
    RingdpError,
    ScheduleError,
    UsageError,
)
from ringdp.parallel import (
    AdamW,
    DistributedDataParallel,
    Engine,
    FullyShardedDataParallel,
    LossScaler,
    Offload,
    Precision,
    SyncBatchNorm,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    export,
    fully_shard,
    initialize,
    load,
    save,
    shard,
)

__all__ = [
    "AdamW",
    "CheckpointError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CommunicationError",
    "Communicator",
    "DistributedDataParallel",
    "Engine",
    "FullyShardedDataParallel",
    "Link",
    "LossScaler",
    "ModelError",
    "Offload",
    "PeerLost",
    "Precision",
    "RingdpError",
    "ScheduleError",
    "SyncBatchNorm",
    "UsageError",
    "Work",
    "ZeroRedundancyOptimizer",
    "clip_grad_norm_",
    "export",
    "fully_shard",
    "init",
    "initialize",
    "load",
    "save",
    "shard",
    "trace",
]

register()
