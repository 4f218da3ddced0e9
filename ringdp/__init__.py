"""ringdp: collectives and data-parallel training (DDP, ZeRO-1, 2, 3) from scratch."""

from ringdp.comm import Communicator, Link, Work, init
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
    LossScaler,
    Offload,
    Precision,
    SyncBatchNorm,
    clip_grad_norm_,
    export,
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
    "clip_grad_norm_",
    "export",
    "init",
    "load",
    "save",
    "shard",
]

register()
